"""The graph pool on a GPU: replays equal eager passes, and captures share memory."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cuda_ranks import needs_gpus
from tests.graph_passes import LANE, LanePasses, capture_all, make_lane_passes
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import GraphPlan, Role
from tlt_megatron.engines.embedded.graph_pool import GraphPool
from tlt_megatron.runtime.device import Device

pytestmark = needs_gpus()
MAX_BATCH_SIZE = 8


# What the allocator takes from the driver at once for small tensors: every memory pool of its own has at least one.
SEGMENT_BYTES = 2 << 20


def make_pool(device: Device, passes: LanePasses) -> GraphPool:
    plan = GraphPlan(
        passes.model.config,
        [SpeculationStrategy.parse(text) for text in ("2_1_2", "3_2_6")],
        max_batch_size=MAX_BATCH_SIZE,
        max_length=LANE,
        item_bytes=passes.model.dtype.itemsize,
    )
    pool = GraphPool(plan, device.graph_memory)
    bind(pool, passes)
    return pool


def bind(pool: GraphPool, passes: LanePasses) -> None:
    pool.bind(passes.model, passes.cache, LANE, passes.draft)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_replayed_graph_equals_the_eager_pass(
    device: Device, role: Role, dtype: torch.dtype
) -> None:
    passes = make_lane_passes(device.torch_device, dtype, num_lanes=MAX_BATCH_SIZE)
    pool = make_pool(device, passes)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]
    shapes = [(1, 1), (3, 2), (8, 3), (5, 4), (1, 1), (8, 3)]
    for seed, (batch_size, num_rows) in enumerate(shapes):
        inputs = passes.inputs(role, batch_size=batch_size, num_rows=num_rows, seed=seed)
        before = passes.cache.kv_LKTH.clone()
        expected = [out.clone() for out in passes.steps[role](inputs)]
        written = passes.cache.kv_LKTH.clone()
        passes.cache.kv_LKTH.copy_(before)
        outputs = pool.run(role, inputs)
        for output, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)
        written[:, :, passes.scratch_slot] = 0
        held = passes.cache.kv_LKTH.clone()
        held[:, :, passes.scratch_slot] = 0
        torch.testing.assert_close(held, written, rtol=tolerance, atol=tolerance)
    assert not pool.eager_passes
    assert pool.num_replays.total() == len(shapes)
    assert pool.num_captures <= len(shapes) - 2 + 1  # two shapes come twice; the largest of all


def reserved_bytes() -> int:
    """What the allocator holds for tensors that live, and for captured graphs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_captures_after_the_largest_lie_in_its_memory(device: Device) -> None:
    passes = make_lane_passes(device.torch_device, torch.bfloat16, num_lanes=MAX_BATCH_SIZE)
    pool = make_pool(device, passes)
    example = {role: passes.inputs(role, batch_size=1, num_rows=1) for role in Role}
    for role in Role:  # the static tensors of both are there then, and the largest capture is
        pool.run(role, example[role])
    before, num_before = reserved_bytes(), pool.num_captures
    capture_all(pool, example)
    num_captures = pool.num_captures - num_before
    assert num_captures > 4 * num_before
    assert reserved_bytes() - before < num_captures * SEGMENT_BYTES / 4


def test_dropped_graphs_give_their_memory_back(device: Device) -> None:
    passes = make_lane_passes(device.torch_device, torch.bfloat16, num_lanes=MAX_BATCH_SIZE)
    pool = make_pool(device, passes)
    inputs = passes.inputs(Role.TARGET, batch_size=8, num_rows=7)
    pool.run(Role.TARGET, inputs)  # the workspace of cuBLAS stays, once for all captures
    pool.drop()
    reserved = reserved_bytes()
    for _ in range(3):
        bind(pool, passes)
        pool.run(Role.TARGET, inputs)
        assert reserved_bytes() > reserved
        pool.drop()
        assert reserved_bytes() <= reserved


def test_capturing_between_other_work_on_the_device_changes_neither(device: Device) -> None:
    passes = make_lane_passes(device.torch_device, torch.float64, num_lanes=MAX_BATCH_SIZE)
    pool = make_pool(device, passes)
    inputs = passes.inputs(Role.TARGET, batch_size=3, num_rows=2)
    expected = passes.steps[Role.TARGET](inputs)[0].clone()
    a = torch.randn(2048, 2048, device=device.torch_device)
    product = a @ a  # still running when the capture begins
    first = pool.run(Role.TARGET, inputs)[0].clone()
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(product, a @ a)
    for _ in range(20):  # replays back to back, and what is read between them
        again = pool.run(Role.TARGET, inputs)[0].clone()
        assert torch.equal(again, first)
