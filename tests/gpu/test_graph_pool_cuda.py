"""The graph pool on a GPU: replays equal eager passes, and captures share memory."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cuda_ranks import needs_gpus
from tests.graph_passes import MAX_BATCH_SIZE, STRATEGIES, capture_all, make_lane_passes
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.runtime.device import Device

pytestmark = needs_gpus()

# What the allocator takes from the driver at once for small tensors: every memory pool of its own
# has at least one.
SEGMENT_BYTES = 2 << 20
CHAIN, TREE = STRATEGIES


@pytest.mark.parametrize("strategy", [OFF, CHAIN, TREE], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_replayed_graph_equals_the_eager_step(
    device: Device, strategy: SpeculationStrategy, dtype: torch.dtype
) -> None:
    """In bfloat16, rounding may change what is drafted and drawn, but neither keys nor features of
    the root.
    """
    passes = make_lane_passes(device.torch_device, dtype, num_lanes=MAX_BATCH_SIZE)
    pool, eager = passes.pool(device.graph_memory), passes.pool(lambda: None)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]
    sizes = [1, 3, 8, 5, 1, 8]
    for seed, batch_size in enumerate(sizes):
        passes.reset()
        expected = passes.run(eager, strategy, batch_size, seed)
        passes.reset()
        outputs = passes.run(pool, strategy, batch_size, seed)
        first = -2 if dtype == torch.bfloat16 else 0
        for output, wanted in zip(outputs[first:], expected[first:], strict=True):
            torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)
        assert passes.cache.kv_LKTH.isfinite().all()
    assert not pool.eager_passes
    assert pool.num_replays.total() == len(sizes) * (1 if strategy.is_off else 2)


def reserved_bytes() -> int:
    """What the allocator holds for tensors that live, and for captured graphs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_captures_after_the_largest_lie_in_its_memory(device: Device) -> None:
    passes = make_lane_passes(device.torch_device, torch.bfloat16, num_lanes=MAX_BATCH_SIZE)
    pool = passes.pool(device.graph_memory)
    passes.run(pool, TREE, 1)  # the largest capture is there then
    before, num_before = reserved_bytes(), pool.num_captures
    capture_all(pool)
    num_captures = pool.num_captures - num_before
    assert num_captures > 4 * num_before
    assert reserved_bytes() - before < num_captures * SEGMENT_BYTES / 4


def test_dropped_graphs_give_their_memory_back(device: Device) -> None:
    passes = make_lane_passes(device.torch_device, torch.bfloat16, num_lanes=MAX_BATCH_SIZE)
    pool = passes.pool(device.graph_memory)
    passes.run(pool, TREE, 8)  # the workspace of cuBLAS stays, once for all captures
    pool.drop()
    reserved = reserved_bytes()
    for _ in range(3):
        pool.bind(passes.steps())
        passes.run(pool, TREE, 8)
        assert reserved_bytes() > reserved
        pool.drop()
        assert reserved_bytes() <= reserved


def test_capturing_between_other_work_on_the_device_changes_neither(device: Device) -> None:
    passes = make_lane_passes(device.torch_device, torch.float64, num_lanes=MAX_BATCH_SIZE)
    pool = passes.pool(device.graph_memory)
    expected = passes.run(passes.pool(lambda: None), OFF, 3)
    a = torch.randn(2048, 2048, device=device.torch_device)
    product = a @ a  # still running when the capture begins
    passes.reset()
    first = passes.run(pool, OFF, 3)
    for output, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(product, a @ a)
    for _ in range(20):  # replays back to back, and what is read between them
        passes.reset()
        again = passes.run(pool, OFF, 3)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))
