"""The graph pool on a GPU: replays equal eager passes, and captures share memory."""

from __future__ import annotations

import pytest
import torch

from tests.graph_passes import LANE, LanePasses, make_lane_passes
from tlt_megatron.engines.embedded.graph_plan import GraphPlan, Role
from tlt_megatron.engines.embedded.graph_pool import GraphPool, addresses_read
from tlt_megatron.runtime.device import Device, select_device
from tlt_megatron.speculation.strategy import SpeculationStrategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAX_BATCH_SIZE = 8


@pytest.fixture
def device() -> Device:
    return select_device("cuda")


def make_pool(device: Device, passes: LanePasses) -> GraphPool:
    plan = GraphPlan(
        passes.model.config,
        [SpeculationStrategy.parse(text) for text in ("2_1_2", "3_2_6")],
        max_batch_size=MAX_BATCH_SIZE,
        max_length=LANE,
        item_bytes=passes.model.dtype.itemsize,
    )
    pool = GraphPool(plan, device.graph_memory)
    pool.bind(
        passes.steps,
        addresses_read(passes.model, passes.cache, passes.draft),
        lane=LANE,
        num_lanes=MAX_BATCH_SIZE,
        scratch_slot=passes.scratch_slot,
    )
    return pool


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
    counts = pool.take_counts()
    assert not counts.num_eager
    assert sum(counts.num_replays.values()) == len(shapes)
    assert counts.num_captures <= len(shapes) - 2 + 1  # two shapes come twice; the largest of all


def test_captures_after_the_largest_take_no_memory_for_activations(device: Device) -> None:
    passes = make_lane_passes(device.torch_device, torch.bfloat16, num_lanes=MAX_BATCH_SIZE)
    pool = make_pool(device, passes)
    example = {role: passes.inputs(role, batch_size=1, num_rows=1) for role in Role}
    pool.run(Role.TARGET, example[Role.TARGET])
    pool.run(Role.DRAFT, example[Role.DRAFT])  # static tensors of both roles are there
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    pool.capture_ahead(example)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved


def test_dropped_graphs_give_their_memory_back(device: Device) -> None:
    passes = make_lane_passes(device.torch_device, torch.bfloat16, num_lanes=MAX_BATCH_SIZE)
    pool = make_pool(device, passes)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    pool.run(Role.TARGET, passes.inputs(Role.TARGET, batch_size=8, num_rows=7))
    assert torch.cuda.memory_reserved() > reserved
    pool.drop()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
