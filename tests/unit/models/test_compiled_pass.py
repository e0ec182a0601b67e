"""A pass of few rows in one loop gives the numbers of its operations one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.slow_draft import make_draft_model
from tests.tiny_models import make_tiny_hf, random_weights, tiny_config
from tests.unit.models.test_own_layer import load_own
from tlt_megatron.models import pass_kernels
from tlt_megatron.models.arithmetic import Arithmetic, compiled_arithmetic
from tlt_megatron.models.attention.lanes import LaneView, causal
from tlt_megatron.models.compiled_pass import CompiledMatrix
from tlt_megatron.models.config import RopeConfig
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.models.transformer import Transformer

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2}
DTYPES = list(TOLERANCE)
LANE = 128
ONE_BY_ONE = replace(compiled_arithmetic(), layers=None, matrix=Matrix)


def near(found: Tensor, expected: Tensor) -> None:
    dtype = expected.dtype
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- one product


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_out, num_in", [(32, 16), (12, 1), (70, 45)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 6, 8, 12, 13, 15])
def test_a_product(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> None:
    weight = normal(num_out, num_in, dtype=dtype)
    x, addend = (normal(40, n + 3, dtype=dtype)[:, 3:] for n in (num_in, num_out))
    x, bias, addend = x[:num_rows], addend[9].clone(), addend[: 2 * num_rows : 2]
    expected = F.linear(x.double(), weight.double())
    near(CompiledMatrix(weight)(x), expected.to(dtype))
    near(CompiledMatrix(weight, bias)(x), (expected + bias).to(dtype))
    before = addend.clone()
    near(CompiledMatrix(weight)(x, addend), (expected + addend).to(dtype))
    near(CompiledMatrix(weight, bias)(x, addend), (expected + bias + addend).to(dtype))
    near(Matrix(weight, bias)(x, addend), (expected + bias + addend).to(dtype))
    assert torch.equal(addend, before)


def test_a_changed_weight_is_read() -> None:
    matrix = CompiledMatrix.empty(8, 16, dtype=torch.float32, device=CPU, has_bias=True)
    weight, bias, x = (normal(*shape, dtype=torch.float32) for shape in ((8, 16), (8,), (3, 16)))
    before = matrix.addresses()
    matrix.set(weight, bias)
    near(matrix(x), F.linear(x, weight, bias))
    assert matrix.addresses() == before, "a pass has kept them"


@pytest.mark.parametrize("has_instruction", [False, True])
def test_pairs_of_bfloat16_with_and_without_their_instruction(
    has_instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines differ in it. Of small integers all sums are exact."""
    if has_instruction and not pass_kernels._HAS_PAIRS:
        pytest.skip("this machine lacks it")
    monkeypatch.setattr(pass_kernels, "_HAS_PAIRS", has_instruction)
    multiply = numba.njit(pass_kernels.multiply.py_func)
    monkeypatch.setattr(pass_kernels, "multiply", multiply)
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-8, 9, (n, 26), generator=draw).to(torch.bfloat16) for n in (11, 33))
    found = CompiledMatrix(weight)(x)
    assert torch.equal(found, F.linear(x.double(), weight.double()).to(torch.bfloat16))


# ---- layers


@pytest.fixture
def num_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each pass that ran as one loop."""
    found: list[int] = []
    run = pass_kernels.run_layers

    def counted(*arguments: Any) -> None:
        found.append(len(arguments[4][0]))  # slots
        run(*arguments)

    monkeypatch.setattr(pass_kernels, "run_layers", counted)
    return found


FAMILIES = [
    {},  # norms of heads
    {"has_qk_norm": False},
    {"has_qkv_bias": True},
    {"num_kv_heads": 4, "ffn_size": 18},
    {"head_dim": 8, "rope": RopeConfig(theta=100.0, partial_rotary_factor=0.5)},
]


def policy_of(changes: dict[str, Any], dtype: torch.dtype, arithmetic: Arithmetic) -> Transformer:
    config = tiny_config(num_layers=3, **changes)
    model = Transformer(config, dtype, CPU, arithmetic)
    for name, tensor in random_weights(config, dtype):
        model.load_hf(name, tensor)
    model.rotary.reserve(LANE)
    return model


def passes(model: Transformer, taps: tuple[int, ...]) -> list[Tensor]:
    """Return the states of passes of one, several and many queries a row, and the KV after them."""
    cache = KvCache(model.config, num_pages=2, page_size=LANE, dtype=model.dtype, device=CPU)
    cache.kv_LKTH.copy_(normal(*cache.kv_LKTH.shape, dtype=model.dtype, seed=1))
    view, found = LaneView(cache, num_rows=2, lane=LANE), []
    for num_queries in (1, 4, 3, 70):
        positions_BM = torch.tensor([[5], [30]]) + torch.arange(num_queries)
        slots_P = (view.starts_B[:, None] + positions_BM).flatten()
        attention = model.arithmetic.lanes(view, slots_P, causal(view, positions_BM, LANE))
        found += model.forward(slots_P % 32, positions_BM.flatten(), attention, taps)
    return [*found, cache.kv_LKTH]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", FAMILIES)
def test_a_policy(changes: dict[str, Any], dtype: torch.dtype, num_rows: list[int]) -> None:
    results = []
    for arithmetic in (compiled_arithmetic(), ONE_BY_ONE):
        model = policy_of(changes, dtype, arithmetic)
        results.append(passes(model, (2, 0)))
    assert num_rows == [2, 8, 6, 64, 6, 64, 6]  # many queries are several parts
    for pair in zip(*results, strict=True):
        near(*pair)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "architecture, options",
    [("eagle", {}), ("eagle3", {}), ("eagle3", {"norm_before_residual": True})],
)
def test_a_drafter(
    architecture: str, options: dict[str, bool], dtype: torch.dtype, num_rows: list[int]
) -> None:
    check_drafter(make_draft_model(architecture, dtype=dtype, **options), num_rows)


def test_the_checkpoints_own_layer(num_rows: list[int], tmp_path: Path) -> None:
    path = make_tiny_hf(tmp_path / "m", "mimo", num_layers=2, vocab_size=32, has_mtp=True)
    check_drafter(load_own(path, torch.float32), num_rows)


def check_drafter(model: DraftModel, num_rows: list[int]) -> None:
    config, dtype = model.config, model.lm_head_VD.dtype
    shape = {name: getattr(config, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    target = tiny_config(num_layers=1, **shape)
    results = []
    for arithmetic in (compiled_arithmetic(), ONE_BY_ONE):
        draft = DraftInference(model, arithmetic=arithmetic)
        draft.rotary.reserve(LANE)
        cache = KvCache(
            target, num_pages=2, page_size=LANE, dtype=dtype, device=CPU, num_draft_layers=1
        )
        cache.kv_LKTH.copy_(normal(*cache.kv_LKTH.shape, dtype=dtype, seed=1))
        view, found = LaneView(cache, num_rows=2, lane=LANE), []
        for num_queries in (1, 4):
            positions_BM = torch.tensor([[5], [30]]) + torch.arange(num_queries)
            slots_P = (view.starts_B[:, None] + positions_BM).flatten()
            visible = causal(view, positions_BM, LANE)
            attention = draft.lanes(view, slots_P, visible, first_layer=1)
            features = normal(len(slots_P), config.feature_size, dtype=dtype, seed=2)
            hidden = draft.fuse(features)
            before = hidden.clone()
            found += draft.forward(slots_P % 8, hidden, positions_BM.flatten(), attention)
            assert torch.equal(hidden, before)
            found.append(draft.logits(found[-1]))
        results.append([*found, cache.kv_LKTH])
    assert num_rows == [2, 8]
    for pair in zip(*results, strict=True):
        near(*pair)
