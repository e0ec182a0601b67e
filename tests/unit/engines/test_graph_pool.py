"""The graph pool over a real model on the CPU: padded replays give what the plain pass gives, and everything is counted.

`RecordedGraphs` stands in for a GPU's graphs: it makes the captured calls again on the same tensors. tests/gpu/test_graph_pool_cuda.py runs the same comparison on real ones.
"""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch

from tests.graph_passes import LANE, LanePasses, RecordedGraphs, make_lane_passes
from tests.slow_draft import make_draft_model
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import GraphPlan, Role
from tlt_megatron.engines.embedded.graph_pool import GraphPool, addresses_read
from tlt_megatron.models.draft_inference import DraftInference

STRATEGIES = ("2_1_2", "3_2_6")
MAX_BATCH_SIZE = 8


@pytest.fixture
def passes() -> LanePasses:
    """With one lane more than batches are planned to have."""
    return make_lane_passes(torch.device("cpu"), torch.float64, num_lanes=MAX_BATCH_SIZE + 1)


@pytest.fixture
def pool(passes: LanePasses) -> GraphPool:
    plan = GraphPlan(
        passes.model.config,
        [SpeculationStrategy.parse(text) for text in STRATEGIES],
        max_batch_size=MAX_BATCH_SIZE,
        max_length=LANE,
        item_bytes=8,
    )
    pool = GraphPool(plan, RecordedGraphs)
    bind(pool, passes)
    return pool


def bind(pool: GraphPool, passes: LanePasses) -> None:
    pool.bind(passes.model, passes.cache, LANE, passes.draft)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("batch_size", [1, 3, 5, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_padded_replay_equals_the_plain_pass(
    pool: GraphPool, passes: LanePasses, role: Role, batch_size: int, num_rows: int
) -> None:
    for seed in range(2):  # the second pass replays with other inputs
        inputs = passes.inputs(role, batch_size=batch_size, num_rows=num_rows, seed=seed)
        before = passes.cache.kv_LKTH.clone()
        expected = [out.clone() for out in passes.steps[role](inputs)]
        written = passes.cache.kv_LKTH.clone()
        passes.cache.kv_LKTH.copy_(before)
        outputs = pool.run(role, inputs)
        assert len(outputs) == len(expected) == 2
        for output, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
        written[:, :, passes.scratch_slot] = 0.0
        held = passes.cache.kv_LKTH.clone()
        assert held[:, :, passes.scratch_slot].isfinite().all()
        held[:, :, passes.scratch_slot] = 0.0
        torch.testing.assert_close(held, written, rtol=1e-12, atol=1e-12)
    assert pool.num_replays.total() == 2
    assert not pool.eager_passes


def test_what_lanes_held_before_does_not_reach_a_padded_pass(
    pool: GraphPool, passes: LanePasses
) -> None:
    """Lanes behind the batch and the scratch slot hold the keys of others: large, but numbers."""
    inputs = passes.inputs(Role.TARGET, batch_size=3, num_rows=2)
    expected = pool.run(Role.TARGET, inputs)[0].clone()
    passes.cache.kv_LKTH[:, :, 3 * LANE :] = 1e6
    torch.testing.assert_close(pool.run(Role.TARGET, inputs)[0], expected, rtol=0, atol=0)


def test_shapes_of_several_strategies_share_a_capture(pool: GraphPool, passes: LanePasses) -> None:
    for num_rows in (3, 7):  # verifying 2 and 6 drafted tokens
        for batch_size in (5, 8):
            pool.run(
                Role.TARGET,
                passes.inputs(Role.TARGET, batch_size=batch_size, num_rows=num_rows),
            )
    assert pool.num_captures == 1
    assert list(pool.num_replays.values()) == [4]
    assert [(k.num_rows, k.batch_size, k.length) for k in pool.num_replays] == [(7, 8, LANE)]


def test_the_largest_pass_is_captured_first_so_that_the_others_fit_into_its_memory(
    pool: GraphPool, passes: LanePasses
) -> None:
    pool.run(Role.TARGET, passes.inputs(Role.TARGET, batch_size=1, num_rows=1))
    assert pool.num_captures == 2
    pool.run(Role.TARGET, passes.inputs(Role.TARGET, batch_size=8, num_rows=7))
    assert pool.num_captures == 2


def test_another_layout_drops_the_captures_and_the_same_keeps_them(
    pool: GraphPool, passes: LanePasses
) -> None:
    inputs = passes.inputs(Role.TARGET, batch_size=8, num_rows=7)
    expected = pool.run(Role.TARGET, inputs)[0].clone()
    bind(pool, passes)
    pool.run(Role.TARGET, inputs)
    assert pool.num_captures == 1
    elsewhere = make_lane_passes(torch.device("cpu"), torch.float64, num_lanes=9)
    bind(pool, elsewhere)
    passes.cache.kv_LKTH.zero_()  # of the old place, which nobody may read any more
    torch.testing.assert_close(pool.run(Role.TARGET, inputs)[0], expected, rtol=0, atol=0)
    assert pool.num_captures == 2
    pool.drop()
    bind(pool, elsewhere)
    pool.run(Role.TARGET, inputs)
    assert pool.num_captures == 3


def test_whatever_moves_changes_the_addresses_and_new_weights_do_not(passes: LanePasses) -> None:
    def addresses() -> Hashable:
        return addresses_read(passes.model, passes.cache, passes.draft)

    before = addresses()
    for name, tensor in list(passes.model.named_hf_tensors()):
        passes.model.load_hf(name, tensor.clone())
    passes.draft.load({name: t * 2.0 for name, t in passes.draft.weights().items()})
    passes.draft.refresh()
    passes.model.rotary.reserve(LANE)
    assert addresses() == before
    seen = {before}
    passes.model.rotary.reserve(4 * LANE + 1)
    seen.add(addresses())
    passes.draft.rotary.reserve(4 * LANE + 1)
    seen.add(addresses())
    passes.cache.kv_LKTH = passes.cache.kv_LKTH.clone()
    seen.add(addresses())
    passes.model.embedding.set_(passes.model.embedding.clone())
    seen.add(addresses())
    other = DraftInference(make_draft_model("eagle"), torch.float64)
    seen.add(addresses_read(passes.model, passes.cache, other))
    assert len(seen) == 6


def test_seconds_of_captures_are_known_apart(pool: GraphPool, passes: LanePasses) -> None:
    inputs = passes.inputs(Role.TARGET, batch_size=8, num_rows=7)
    pool.run(Role.TARGET, inputs)
    captured_s = pool.capture_s
    assert captured_s > 0.0
    pool.run(Role.TARGET, inputs)
    assert pool.capture_s == captured_s
