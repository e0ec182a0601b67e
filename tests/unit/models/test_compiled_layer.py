"""The compiled loops give the numbers of torch's operations, and the bits of every row alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import make_tiny_hf
from tests.unit.models.test_compiled_pass import passes, policy_of
from tlt_megatron.mcore.layer_gradients import Gate, Norm
from tlt_megatron.models import arithmetic
from tlt_megatron.models.arithmetic import PLAIN, compiled_arithmetic, fastest_arithmetic
from tlt_megatron.models.attention.lanes import LaneView, causal, drafted
from tlt_megatron.models.attention.packed import attend_packed
from tlt_megatron.models.attention.paged import PrefillSegment
from tlt_megatron.models.attention.tables import TableRead
from tlt_megatron.models.compiled_layer import CompiledNorm, CompiledTables
from tlt_megatron.models.config import ModelConfig, load_model_config
from tlt_megatron.models.invariant_arithmetic import invariant_arithmetic
from tlt_megatron.models.kv_cache import KvCache, SequenceKv
from tlt_megatron.models.layers import RmsNorm
from tlt_megatron.runtime.device import has_numba

CPU = torch.device("cpu")
COMPILED = compiled_arithmetic()
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
PAGE = 8
SIZES = {"hidden_size": 72, "num_key_value_heads": 2}
# A root with two children, of which the second has two.
TREE = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 0, 1]]
).bool()
CHAIN = torch.ones(5, 5).tril().bool()
ROOTS = torch.ones(1, 1).bool()


def near(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Of heads of 18 values, which no vector length divides, two for a kv head."""
    folder = make_tiny_hf(tmp_path_factory.mktemp("model"), "llama", num_layers=2, **SIZES)
    return load_model_config(folder)


def filled(config: ModelConfig, dtype: torch.dtype, num_pages: int = 32) -> KvCache:
    cache = KvCache(config, num_pages=num_pages, page_size=PAGE, dtype=dtype, device=CPU)
    cache.kv_LKTH.copy_(normal(*cache.kv_LKTH.shape, dtype=dtype, seed=1))
    return cache


def heads_of(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return queries, and keys and values: parts of the same rows, as in a layer."""
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    heads = normal(num_tokens, num_heads + 2 * num_kv_heads, config.head_dim, dtype=dtype, seed=2)
    return heads[:, :num_heads], heads[:, num_heads:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (7, 72), (3, 2, 130), (40, 128)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = 3 * normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    ours, theirs = CompiledNorm(1e-5, dtype, CPU), RmsNorm(1e-5, dtype, CPU)
    near(ours(x, weight), theirs(x, weight))
    near(ours(x), theirs(x))
    if x.dim() > 2:
        return
    residual = normal(shape[0], shape[1] + 6, dtype=dtype, seed=2)[:, 3:-3]

    def layer(inputs: Tensor, addend: Tensor | None) -> Tensor:
        return inputs * 2 if addend is None else inputs * 2 + addend

    before = residual.clone()
    for found, expected in zip(
        ours.after(layer, x, residual, weight),
        theirs.after(layer, x, residual, weight),
        strict=True,
    ):
        near(found, expected)
    assert torch.equal(residual, before), "the residual of the layer before is still read"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("size, num_turned", [(8, 8), (18, 18), (32, 16)])
def test_rotation(size: int, num_turned: int, is_normed: bool, dtype: torch.dtype) -> None:
    """Rows are parts of wider ones, as in EAGLE. Part of a head may turn, as in GLM."""
    heads = normal(5, 3 + 6 * size, dtype=dtype)[:, 3:].view(5, 6, size)
    angles = torch.linspace(0, 7, 5 * num_turned // 2).view(5, 1, -1).repeat(1, 1, 2).double()
    sin = angles.sin()
    sin[..., : num_turned // 2] *= -1
    table = torch.cat((angles.cos(), sin), dim=-1).to(dtype).chunk(2, dim=-1)
    weight = normal(4, size, dtype=dtype, seed=1) if is_normed else None
    norms = CompiledNorm(1e-5, dtype, CPU), RmsNorm(1e-5, dtype, CPU)
    found = COMPILED.rotate(heads.clone(), 4, table, norms[0], weight)
    near(found, PLAIN.rotate(heads.clone(), 4, table, norms[1], weight))
    assert torch.equal(found[:, 4:], heads[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 384])
def test_gate(size: int, dtype: torch.dtype) -> None:
    values = torch.cat((20 * normal(6, size, dtype=dtype), normal(6, size, dtype=dtype)), dim=1)
    values[0, 0] = -300.0  # where exp overflows
    near(COMPILED.gate(*values.chunk(2, dim=1)), PLAIN.gate(*values.chunk(2, dim=1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_unequal_rows_with_shared_prompts(config: ModelConfig, dtype: torch.dtype) -> None:
    caches = filled(config, dtype), filled(config, dtype)
    results = []
    for cache, kernels in zip(caches, (PLAIN, COMPILED), strict=True):
        draw = random.Random(0)
        prompts: list[list[int]] = []
        for length in (3, 8, 21):
            prompts.append([])
            assert cache.take_prompt_pages(prompts[-1], cache.pages_for(length))
        rows, slots, positions = [], [], []
        for length, prompt in zip((3, 8, 21), prompts, strict=True):
            for _ in range(2):
                count = draw.randint(1, 30)
                row = SequenceKv(num_prompt=length, prompt=prompt)
                for _ in range(cache.pages_for(count)):
                    assert cache.take_response_page(row.pages)
                rows.append(row)
                positions.append(length + count - 1)
                cache.mark_written(cache.sequence_slots(row, length + count))
                slots.append(cache.sequence_slots(row, length + count)[-1])
        attention = kernels.paged(cache)
        attention.rebuild(rows)
        of_pass = attention.pass_of(torch.stack(slots), torch.tensor(positions))
        results.append(of_pass.attend(1, *heads_of(config, len(rows), dtype)))
    near(results[1], results[0])
    assert torch.equal(caches[0].kv_LKTH, caches[1].kv_LKTH)


def lane_results(
    config: ModelConfig, dtype: torch.dtype, kernels: Any, ancestors_RR: Tensor
) -> Tensor:
    positions = [0, 17, 40]
    ancestors_BRR = ancestors_RR.expand(len(positions), -1, -1)
    cache = filled(config, dtype)
    view = LaneView(cache, num_rows=len(positions), lane=8 * PAGE)
    position_B = torch.tensor(positions)
    slots_B = view.starts_B + position_B
    for start, count in zip(view.starts_B.tolist(), positions, strict=True):
        cache.mark_written(torch.arange(start, start + count))
    num_queries = ancestors_BRR.shape[1]
    slots_P = (slots_B[:, None] + torch.arange(num_queries)).flatten()
    length, is_chain = view.read_length(8 * PAGE), ancestors_RR is not TREE
    visible = drafted(view, position_B, lambda: ancestors_BRR, length, is_chain=is_chain)
    attention = kernels.lanes(view, slots_P, visible)
    return attention.attend(0, *heads_of(config, len(slots_P), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seen", [ROOTS, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_lanes(config: ModelConfig, dtype: torch.dtype, seen: Tensor) -> None:
    found = lane_results(config, dtype, COMPILED, seen)
    near(found, lane_results(config, dtype, PLAIN, seen))


@pytest.mark.parametrize("num_queries", [3, 64, 70])
def test_a_causal_extension(config: ModelConfig, num_queries: int) -> None:
    """As `LaneSteps.extend` reads: queries before the last committed position."""
    results = []
    for kernels in (PLAIN, COMPILED):
        cache = filled(config, torch.float32)
        view = LaneView(cache, num_rows=2, lane=16 * PAGE)
        positions_BM = torch.tensor([[3], [20]]) + torch.arange(num_queries)
        slots_P = (view.starts_B[:, None] + positions_BM).flatten()
        attention = kernels.lanes(view, slots_P, causal(view, positions_BM, 96), first_layer=1)
        results.append(attention.attend(0, *heads_of(config, 2 * num_queries, torch.float32)))
    near(results[1], results[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_whole_and_later_segments(config: ModelConfig, dtype: torch.dtype) -> None:
    results = []
    for prefill in (PLAIN.prefill, invariant_arithmetic(config, dtype, CPU).prefill):
        cache = filled(config, dtype)
        segments = [
            PrefillSegment(new_slots_C=torch.arange(70), context_slots_S=torch.arange(70)),
            PrefillSegment(new_slots_C=torch.arange(90, 99), context_slots_S=torch.arange(80, 99)),
        ]
        results.append(prefill(cache, segments).attend(0, *heads_of(config, 79, dtype)))
    near(results[1], results[0])


def test_values_that_are_not_numbers_stay_visible() -> None:
    """A policy that has diverged must not look like one that has not."""
    for value in (torch.nan, torch.inf):
        for dtype in DTYPES:
            x = normal(2, 16, dtype=dtype)
            x[1, 3] = value
            normed = COMPILED.norm(1e-5, dtype, CPU)(x)
            assert normed[0].isfinite().all()
            assert not normed[1].isfinite().all()
            gated = COMPILED.gate(*x.chunk(2, dim=1))
            assert not gated[1].isfinite().all()


def test_an_infinity_of_one_sequence_reaches_no_other(config: ModelConfig) -> None:
    """A table is padded with slots of others."""
    cache, slots = filled(config, torch.float32), torch.tensor([12, 21])
    cache.kv_LKTH[:, :, [0, 13, 14, 15, 22, 23]] = torch.inf
    table_XS = torch.stack((torch.arange(8, 16), torch.arange(16, 24)))
    read = TableRead(table_XS, torch.tensor([[4], [5]]))
    attention = CompiledTables(cache, slots, [read])
    assert attention.attend(0, *heads_of(config, 2, torch.float32)).isfinite().all()


def test_a_numba_that_cannot_be_imported_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not has_numba.__wrapped__()
    assert "numba cannot be imported" in caplog.text


def test_the_plain_arithmetic_serves_several_threads_and_machines_without_numba(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fastest_arithmetic(CPU) is COMPILED
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert fastest_arithmetic(CPU) is PLAIN
    monkeypatch.undo()
    monkeypatch.setattr(arithmetic, "has_loops", lambda _: False)
    assert fastest_arithmetic(CPU) is PLAIN


def every_loop(config: ModelConfig) -> list[Tensor]:
    """Results of every loop, for the test below."""
    dtype, results = torch.float32, []
    x, norm = normal(7, 72, dtype=dtype), CompiledNorm(1e-5, dtype, CPU)
    heads, angles = heads_of(config, 70, dtype), torch.linspace(0, 7, 70 * 36).view(70, 1, 36)
    cache, slots = filled(config, dtype), torch.arange(70)
    segment = PrefillSegment(new_slots_C=slots, context_slots_S=slots)
    results += norm.after(lambda inputs, _: inputs * 2, x, x, x[0])
    results += [norm(x), COMPILED.gate(*x.chunk(2, dim=1))]
    results += [COMPILED.rotate(heads[0].clone(), 2, angles.chunk(2, dim=2), norm, None)]
    results += [lane_results(config, dtype, COMPILED, seen) for seen in (ROOTS, CHAIN, TREE)]
    results += passes(policy_of({}, dtype, COMPILED), (1,))
    results.append(COMPILED.matrix(normal(8, 16, dtype=dtype))(normal(3, 16, dtype=dtype)))
    prefill = invariant_arithmetic(config, dtype, CPU).prefill
    results.append(prefill(cache, [segment]).attend(0, *heads))
    query, key, value = (each.requires_grad_() for each in (heads[0], *heads[1].chunk(2, dim=1)))
    weight = x[0].clone().requires_grad_()
    x.requires_grad_()
    attended = attend_packed(query, key, value, [7, 63])
    outputs = [Norm.apply(x, weight, 1e-5), Gate.apply(x), attended]
    sums = [each.square().sum() for each in outputs]
    return [*results, *outputs, *torch.autograd.grad(sums, [x, weight, query, key, value])]


def test_bits_do_not_depend_on_whether_loops_are_compiled_or_found(tmp_path: Path) -> None:
    """A resumed run finds what the run before it compiled, and repeats its numbers."""
    folder = make_tiny_hf(tmp_path / "model", "llama", num_layers=2, **SIZES)
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from tests.unit.models.test_compiled_layer import every_loop, load_model_config, Path\n"
        "torch.save(every_loop(load_model_config(Path(sys.argv[1]))), sys.argv[2])"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    results = []
    for name in ("compiled", "found"):
        command = [sys.executable, "-c", code, str(folder), str(tmp_path / name)]
        subprocess.run(command, env=environment, check=True)
        results.append(torch.load(tmp_path / name))
    for compiled, found in zip(*results, strict=True):
        assert torch.equal(found, compiled)
    # One machine code for each loop, so that prefill, chains and trees add in the same order.
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == 11


def test_loops_compile_where_no_folder_can_be_written(tmp_path: Path) -> None:
    """A container may have a read-only root and no home."""
    code = (
        "import numba.core.caching as c; c.CacheImpl._locator_classes = []\n"
        "import torch; from tlt_megatron.models.compiled_layer import gate_silu\n"
        "print(gate_silu(torch.ones(1, 4), torch.ones(1, 4)).sum().item())"
    )
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(output) == pytest.approx(4 * 0.7310586)
