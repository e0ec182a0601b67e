"""`rollout.batch_invariant` on CUDA: a row has the same bits in every pass.

It shows that the same numbers are added in the same order, not how a GPU rounds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE, launch_on_host

if DEVICE == "cuda":
    pytest.skip("tests/gpu has the real one", allow_module_level=True)

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.tiny_models import random_weights, tiny_config
from tests.unit.engines.conftest import checksum, speculate
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.models.attention.kernels import attend_in_chunks
from tlt_megatron.models.attention.lanes import LaneView, Visible
from tlt_megatron.models.attention.ordered_kernel import OrderedAttention, attend_ordered
from tlt_megatron.models.attention.tables import table_lanes
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.row_kernels import multiply
from tlt_megatron.types import Prompt, SamplingParams
from tools.gpu.pretend_cuda import pretend_device

DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BATCHES = (1, 3, 17, 64)


def wide_values(handle: TensorHandle) -> np.ndarray:
    """The interpreter holds bfloat16 as its bits."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


@pytest.fixture(autouse=True)
def dot_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds even and odd products apart, as units of a GPU do: a key at another place is visible.

    The order of numpy's BLAS depends on a row's place too.
    """

    def create_dot(
        self: InterpreterBuilder,
        a: TensorHandle,
        b: TensorHandle,
        total: TensorHandle,
        *rest: object,
    ) -> TensorHandle:
        left, right = wide_values(a), wide_values(b)
        sums = np.zeros((2, *total.data.shape), total.data.dtype)
        for k in np.flatnonzero(left.any(axis=0)):
            sums[k % 2] += left[:, k : k + 1] * right[k]
        return TensorHandle(total.data + (sums[0] + sums[1]), total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_is_the_same_in_every_batch(dtype: torch.dtype) -> None:
    x, weight = normal(81, 100, dtype=dtype), normal(72, 100, dtype=dtype, seed=1)
    bias = normal(72, dtype=dtype, seed=2)
    product = multiply(x, weight, bias)
    close = {"atol": 10 * CLOSE[dtype], "rtol": CLOSE[dtype]}
    torch.testing.assert_close(product, torch.nn.functional.linear(x, weight, bias), **close)
    for size in BATCHES:
        assert torch.equal(multiply(x[81 - size :], weight, bias), product[81 - size :])


def test_attention_depends_on_the_keys_in_order_alone() -> None:
    """Tokens with other neighbours, in a table of one or two parts, with their keys in other
    slots.
    """
    num_slots, lengths = 540, torch.tensor([1, 63, 64, 65, 200, *range(2, 61)])
    kv = normal(2, num_slots, 24, dtype=torch.bfloat16)
    query = normal(64, 3, 24, dtype=torch.bfloat16, seed=1)
    in_place = torch.arange(num_slots).unsqueeze(0)
    rows = torch.zeros(64, dtype=torch.int64)
    expected = attend_ordered(query, kv, in_place, rows, lengths)
    moved_to = torch.randperm(num_slots, generator=torch.Generator().manual_seed(2))
    moved = torch.empty_like(kv).index_copy_(1, moved_to, kv)
    for size in BATCHES:
        part = slice(64 - size, None)
        table = moved_to[:300].repeat(size, 1)
        found = attend_ordered(query[part], moved, table, torch.arange(size), lengths[part])
        assert torch.equal(found, expected[part])
    key, value = (x[None, :, :200].float() for x in kv.chunk(2))
    plain, _ = attend_in_chunks(query[4].view(1, 1, 3, 24).float(), key, value)
    torch.testing.assert_close(expected[4].float(), plain.flatten(), atol=0.02, rtol=0.02)


def test_a_tree_node_reads_its_path_in_order() -> None:
    """Its parent is not in the slot before it. After a commit it is."""
    config = tiny_config()
    cache = KvCache(
        config, num_pages=1, page_size=64, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    cache.layers[0].copy_(normal(4, 64, 6, dtype=torch.bfloat16))
    view = LaneView(cache, num_rows=1, lane=64)
    query = normal(1, 4, 6, dtype=torch.bfloat16, seed=1)
    own = normal(1, 4, 6, dtype=torch.bfloat16, seed=2)
    outs = []
    for path in ([10, 13, 17], [10, 11, 12]):
        bias = torch.full((1, 1, 32), -torch.inf, dtype=torch.bfloat16)
        bias[..., [*range(10), *path]] = 0.0
        visible = Visible(32, lambda bias=bias: bias)
        attention = table_lanes(OrderedAttention, view, torch.tensor(path[-1:]), visible)
        outs.append(attention.attend(0, query, own))
        cache.layers[0][:, 11] = cache.layers[0][:, 13]
    assert torch.equal(*outs)


def test_speculation_on_a_pretended_gpu_gives_the_bits_of_plain_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16: prompts in chunks, pages, lanes, and trees in captured graphs."""
    config = tiny_config(vocab_size=48, num_layers=1)
    params = SamplingParams(max_new_tokens=5, seed=5)
    prompts = [
        Prompt(prompt_id=str(i), draw_index=i, token_ids=tuple(range(8, 8 + size)))
        for i, size in enumerate((3, 16))
    ]
    weights = random_weights(config, torch.bfloat16)

    def responses(
        strategy: str, batch_size: int, *, graphs: str
    ) -> list[tuple[list[int], list[float]]]:
        section = RolloutSection(
            dtype="bfloat16",
            batch_invariant=True,
            max_batch_size=batch_size,
            num_samples=1,
            max_new_tokens=8,
            graphs=graphs,
            prefill_chunk_tokens=10,
        )
        engine = EmbeddedEngine(config, section, device, max_prompt_tokens=32)
        engine.load_weights(weights, version=1, checksum=lambda: checksum(weights))
        if strategy != "off":
            speculate(engine, strategy)
        groups = engine.generate(prompts, params, policy_version=1)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if strategy != "off":
            assert max(n for each in rollouts for n in each.accept_lengths) > 1
        return [(each.token_ids.tolist(), each.logprobs.tolist()) for each in rollouts]

    device = pretend_device()
    launch_on_host(monkeypatch, device.gpu.note_launch)
    with device.gpu:
        expected = responses("off", 2, graphs="off")
        assert responses("off", 1, graphs="off") == expected
        assert responses("2_8_12", 2, graphs="free") == expected
        assert device.gpu.num_captures > 0
