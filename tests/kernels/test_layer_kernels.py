"""The Triton kernels between two matrices of a layer against their torch forms."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE, launch_on_host
from tests.tiny_models import random_weights, tiny_config
from tests.unit.engines.conftest import checksum
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.models.arithmetic import PLAIN
from tlt_megatron.models.layer_kernels import FusedNorm, gate_silu, rotate
from tlt_megatron.models.layers import RmsNorm
from tlt_megatron.types import Prompt, SamplingParams
from tools.gpu.pretend_cuda import pretend_device

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(CLOSE)
EPS = 1e-6


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def norms(dtype: torch.dtype) -> tuple[RmsNorm, FusedNorm]:
    device = torch.device(DEVICE)
    return RmsNorm(EPS, dtype, device), FusedNorm(EPS, dtype, device)


def check(found: Tensor, expected: Tensor) -> None:
    tolerance = CLOSE[expected.dtype]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_weight", [True, False])
def test_a_sum_and_its_norm_are_those_of_the_torch_form(
    dtype: torch.dtype, has_weight: bool
) -> None:
    """The residual is a part of wider rows, as that of an EAGLE drafter is."""
    x, weight = normal(5, 100, dtype=dtype), normal(100, dtype=dtype, seed=1)
    residual = normal(5, 140, dtype=dtype, seed=2)[:, :100]
    plain, fused = norms(dtype)

    def layer(inputs: Tensor, addend: Tensor | None) -> Tensor:
        return inputs * 2 if addend is None else inputs * 2 + addend

    expected = plain.after(layer, x, residual, weight if has_weight else None)
    found = fused.after(layer, x, residual, weight if has_weight else None)
    for one, other in zip(found, expected, strict=True):
        check(one, other)
    check(fused(x, weight), plain(x, weight))
    pairs = normal(5, 2, 50, dtype=dtype, seed=3)
    check(fused(pairs), plain(pairs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("head_dim, rotary_dim", [(24, 24), (32, 16)])
def test_heads_are_normalized_and_rotated_as_in_the_torch_form(
    dtype: torch.dtype, has_norm: bool, head_dim: int, rotary_dim: int
) -> None:
    """Four heads of queries, two of keys, and two of values, which stay."""
    wide = normal(5, 8 * head_dim + 40, dtype=dtype)
    heads = wide[:, 40:].view(5, 8, head_dim)
    angles = normal(5, 1, 2 * rotary_dim, dtype=dtype, seed=1).chunk(2, dim=-1)
    weight = normal(6, head_dim, dtype=dtype, seed=2) if has_norm else None
    plain, fused = norms(dtype)
    found = rotate(heads, 6, angles, fused, weight)
    check(found, PLAIN.rotate(heads.clone(), 6, angles, plain, weight))
    assert torch.equal(found[:, 6:], heads[:, 6:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_that_of_the_torch_form(dtype: torch.dtype) -> None:
    gate, up = normal(5, 2 * 1100, dtype=dtype).mul_(20).chunk(2, dim=1)
    check(gate_silu(gate, up), PLAIN.gate(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_every_batch(dtype: torch.dtype) -> None:
    x, heads = normal(81, 100, dtype=dtype), normal(81, 4, 24, dtype=dtype, seed=1)
    weight, scales = normal(100, dtype=dtype, seed=2), normal(3, 24, dtype=dtype, seed=3)
    cos, sin = normal(81, 1, 48, dtype=dtype, seed=4).chunk(2, dim=-1)
    _, norm = norms(dtype)

    def run(rows: slice) -> tuple[Tensor, ...]:
        given = x[rows]
        return (
            *norm.after(lambda inputs, _: inputs.clone(), given, given, weight),
            rotate(heads[rows], 3, (cos[rows], sin[rows]), norm, scales),
            gate_silu(*given.chunk(2, dim=1)),
        )

    whole = run(slice(None))
    for size in (1, 3, 17, 64):
        rows = slice(81 - size, None)
        assert all(torch.equal(a, b[rows]) for a, b in zip(run(rows), whole, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real one")
@pytest.mark.parametrize(("model_type", "most"), [("qwen2", 10), ("qwen3", 10)])
def test_a_layer_of_a_plain_pass_is_few_nodes_of_its_graph(
    monkeypatch: pytest.MonkeyPatch, model_type: str, most: int
) -> None:
    """And one more to merge the parts of more than 512 keys."""
    device, nodes = pretend_device(), []
    launch_on_host(monkeypatch, device.gpu.note_launch)
    params = SamplingParams(max_new_tokens=8, seed=5)
    prompts = [Prompt(prompt_id="0", draw_index=0, token_ids=(8, 9, 10))]
    for num_layers in (1, 3):
        config = tiny_config(vocab_size=48, num_layers=num_layers, model_type=model_type)
        section = RolloutSection(dtype="float64", max_batch_size=1, num_samples=1, max_new_tokens=8)
        weights = random_weights(config, torch.float64)
        with device.gpu:
            engine = EmbeddedEngine(config, section, device, max_prompt_tokens=32)
            engine.load_weights(weights, version=1, checksum=partial(checksum, weights))
            before = device.gpu.num_nodes
            engine.generate(prompts, params, policy_version=1)
            nodes.append((device.gpu.num_nodes - before) / engine.stats().num_graph_replays)
        assert engine.stats().eager_passes == {}
    few, many = nodes
    assert (many - few) / 2 <= most
    assert few - most <= 60  # embedding, masks, head, sampling and bookkeeping
