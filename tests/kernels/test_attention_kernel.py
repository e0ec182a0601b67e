"""The Triton attention against its torch form, and that all kernels compile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE

# isort: split
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.tiny_models import random_weights, tiny_config
from tests.unit.engines.conftest import checksum, speculate
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.models.attention import kernels
from tlt_megatron.models.attention.kernels import attend_fused, attend_in_chunks
from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.runtime.device import Device, select_device
from tlt_megatron.types import Prompt, Rollout, SamplingParams
from tools.gpu.pretend_cuda import pretend_device

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
PROMPTS = (70, 0, 513, 31)  # committed keys of each row before the queries


@pytest.fixture(autouse=True)
def bfloat16_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter holds bfloat16 as its bits, and its dot multiplies them as integers."""
    multiply = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object
    ) -> TensorHandle:
        return multiply(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def uniform(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """In [-1, 1)."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1.0).to(dtype)


def bias_of(kind: str, num_nodes: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, X, S]: nodes lie behind the prompt and see it, their ancestors and themselves."""
    if kind == "chain":
        parents = range(-1, num_nodes - 1)
    else:  # each node has two children
        parents = [(node - 1) // 2 if node else -1 for node in range(num_nodes)]
    ancestors = torch.eye(num_nodes, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    bias = torch.full((len(PROMPTS), 1, num_nodes, num_keys), -torch.inf, dtype=dtype)
    for row, num_prompt in enumerate(PROMPTS):
        bias[row, 0, :, :num_prompt] = 0.0
        drafted = bias[row, 0, :, num_prompt : num_prompt + num_nodes]
        drafted.masked_fill_(ancestors, 0.0)
    return bias


def check(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> None:
    """Against the torch form in a wider dtype, whose inputs are the same."""
    dtype, repeat = query.dtype, query.shape[2] // bias.shape[2]
    wide = torch.float64 if dtype in (torch.float64, torch.float32) else torch.float32
    spread = bias.repeat_interleave(repeat, dim=2) if bias.shape[2] > 1 else bias
    expected = attend_in_chunks(*(x.to(wide) for x in (query, key, value, spread)))
    found = attend_fused(*(x.to(DEVICE) for x in (query, key, value, bias)))
    assert found[0].dtype == dtype
    assert found[1].dtype == wide_dtype(dtype)
    for x, y in zip(found, expected, strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(x.cpu().to(wide), y, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "kind, num_nodes, num_kv_heads, repeat, head_dim, dtype",
    [
        ("chain", 1, 2, 7, 128, torch.float32),
        ("chain", 1, 3, 1, 80, torch.bfloat16),
        ("chain", 1, 1, 2, 96, torch.float64),
        ("chain", 5, 2, 4, 64, torch.float32),
        ("chain", 5, 1, 7, 128, torch.bfloat16),
        ("tree", 12, 1, 7, 128, torch.float32),  # 84 queries: two blocks
        ("tree", 12, 2, 1, 80, torch.float32),
        ("tree", 12, 1, 4, 64, torch.float16),
    ],
)
def test_attention_is_that_of_the_torch_form(
    kind: str, num_nodes: int, num_kv_heads: int, repeat: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Keys and values are views of a pool with more slots, as lanes are. 550 keys are 9 parts."""
    num_rows, num_keys = len(PROMPTS), 550
    pool = uniform(2 * num_kv_heads, num_rows * 576, head_dim, dtype=dtype)
    lanes = pool.unflatten(1, (num_rows, 576)).transpose(0, 1)[:, :, :num_keys]
    key, value = lanes.chunk(2, dim=1)
    query = 4 * uniform(num_rows, num_kv_heads, num_nodes * repeat, head_dim, dtype=dtype, seed=1)
    check(query, key, value, bias_of(kind, num_nodes, num_keys, dtype))


@pytest.mark.parametrize("part", [512, 64])
def test_lanes_that_start_anywhere_are_read_there(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of them ends at the end of the pool, and in parts of any size."""
    monkeypatch.setattr(kernels, "part_keys", lambda *_: part)
    dtype, num_keys, starts_B = torch.float32, 550, torch.tensor([576, 40, 1300, 1960])
    pool = uniform(2, 2000, 64, dtype=dtype)
    slots_BS = (starts_B.unsqueeze(1) + torch.arange(num_keys)).clamp(max=1999)
    keys, values = pool[:, slots_BS].transpose(0, 1).chunk(2, dim=1)
    query = 4 * uniform(4, 1, 10, 64, dtype=dtype, seed=1)
    bias = bias_of("chain", 5, num_keys, dtype)
    expected = attend_in_chunks(query, keys, values, bias.repeat_interleave(2, dim=2))
    key, value = pool[:, :num_keys].expand(4, -1, -1, -1).to(DEVICE).chunk(2, dim=1)
    on_device = (x.to(DEVICE) for x in (query, bias, starts_B))
    query, bias, starts_B = on_device
    for found, wanted in zip(
        attend_fused(query, key, value, bias, starts_B), expected, strict=True
    ):
        torch.testing.assert_close(found.cpu(), wanted, atol=1e-5, rtol=1e-5)


def test_a_query_that_sees_nothing_adds_nothing_and_keys_after_the_last_seen_are_not_read() -> None:
    query, key, value = (uniform(2, 1, 4, 64, dtype=torch.float32).to(DEVICE) for _ in range(3))
    key, value = (x.repeat(1, 1, 150, 1) for x in (key, value))  # 600 keys
    bias = torch.full((2, 1, 1, 600), -torch.inf, device=DEVICE)
    bias[0, ..., :40] = 0.0
    expected = attend_fused(query, key, value, bias)
    for x in (key, value):
        x[:, :, 64:] = torch.nan
    for found, whole in zip(attend_fused(query, key, value, bias), expected, strict=True):
        assert torch.equal(found, whole)
    out, lse = expected
    assert out[0].isfinite().all()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert lse[1].eq(-torch.inf).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real one")
@pytest.mark.parametrize("strategy", ["off", "3_2_6"])
def test_an_engine_on_a_pretended_gpu_does_what_it_does_on_a_cpu(
    strategy: str,
) -> None:
    """In float64: a prompt in two chunks, pages while a request waits, then lanes, and trees by
    mask.
    """
    config = tiny_config(vocab_size=48, num_layers=2)
    section = RolloutSection(
        dtype="float64",
        max_batch_size=2,
        num_samples=3,
        max_new_tokens=32,
        graphs="off",
        prefill_chunk_tokens=20,
    )
    params = SamplingParams(num_samples=3, max_new_tokens=6, seed=5)
    prompts = [Prompt(prompt_id="0", draw_index=0, token_ids=tuple(range(8, 38)))]
    weights = random_weights(config, torch.float64)

    def rollouts_on(device: Device, strategy: SpeculationStrategy) -> list[Rollout]:
        engine = EmbeddedEngine(config, section, device)
        engine.load_weights(weights, version=1, checksum=lambda: checksum(weights))
        if not strategy.is_off:
            speculate(engine, [strategy])
        groups = engine.generate(prompts, params, policy_version=1)
        return [rollout for group in groups for rollout in group.rollouts]

    expected = rollouts_on(select_device("cpu"), OFF)
    device = pretend_device()
    with device.gpu:
        found = rollouts_on(device, SpeculationStrategy.parse(strategy))
    for here, there in zip(found, expected, strict=True):
        assert torch.equal(here.token_ids, there.token_ids)
        torch.testing.assert_close(here.logprobs, there.logprobs, atol=1e-6, rtol=1e-6)
