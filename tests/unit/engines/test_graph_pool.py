"""The graph pool over a real model on the CPU: padded replays give what the plain step gives, and
everything is counted.

`RecordedGraphs` stands in for a GPU's graphs: it makes the captured calls again on the same
tensors. tests/gpu/test_graph_pool_cuda.py runs the same comparison on real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import pytest
import torch

from tests.graph_passes import (
    LANE,
    MAX_BATCH_SIZE,
    STRATEGIES,
    LanePasses,
    RecordedGraphs,
    make_lane_passes,
)
from tests.slow_draft import make_draft_model
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.graph_pool import GraphPool
from tlt_megatron.engines.embedded.lane_steps import LaneSteps
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.types import SamplingParams

CHAIN, TREE = STRATEGIES


@pytest.fixture
def passes() -> LanePasses:
    """With one lane more than batches are planned to have."""
    return make_lane_passes(torch.device("cpu"), torch.float64, num_lanes=MAX_BATCH_SIZE + 1)


@pytest.fixture
def pool(passes: LanePasses) -> GraphPool:
    return passes.pool(RecordedGraphs)


@pytest.mark.parametrize("strategy", [OFF, CHAIN, TREE], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 5, 8])
def test_padded_replay_equals_the_plain_step(
    pool: GraphPool, passes: LanePasses, strategy: SpeculationStrategy, batch_size: int
) -> None:
    eager, cache = passes.pool(lambda: None), passes.cache
    for seed in range(3):  # the later ones replay with other rows
        passes.reset()
        expected = passes.run(eager, strategy, batch_size, seed)
        visible_T = cache.bias_T[: cache.scratch_slot].clone()
        written = cache.kv_LKTH[:, :, : cache.scratch_slot][:, :, visible_T == 0].clone()
        passes.reset()
        outputs = passes.run(pool, strategy, batch_size, seed)
        for output, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(cache.bias_T[: cache.scratch_slot], visible_T)
        held = cache.kv_LKTH[:, :, : cache.scratch_slot][:, :, visible_T == 0]
        torch.testing.assert_close(held, written, rtol=1e-12, atol=1e-12)
        assert cache.kv_LKTH.isfinite().all()
    assert pool.num_replays.total() == (3 if strategy.is_off else 6)
    assert not pool.eager_passes


def test_what_lanes_held_before_does_not_reach_a_padded_step(
    pool: GraphPool, passes: LanePasses
) -> None:
    """Lanes behind the batch and the scratch page hold the keys of others: large, but numbers."""
    expected = passes.run(pool, TREE, 3)
    passes.reset()
    passes.cache.kv_LKTH[:, :, 3 * LANE :] = 1e6
    for output, wanted in zip(passes.run(pool, TREE, 3), expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=0, atol=0)
    assert passes.cache.kv_LKTH[:, :, 3 * LANE : passes.cache.scratch_slot].eq(1e6).all()


def test_shapes_of_several_strategies_share_a_capture(pool: GraphPool, passes: LanePasses) -> None:
    for strategy in (CHAIN, TREE):  # verifying 2 and 6 drafted tokens
        for batch_size in (5, 8):
            passes.run(pool, strategy, batch_size)
    replays = {key: count for key, count in pool.num_replays.items() if key.strategy is None}
    assert list(replays.values()) == [4]
    assert [(k.num_rows, k.depth, k.batch_size, k.length) for k in replays] == [(7, 3, 8, LANE)]
    assert [(k.strategy, k.num_rows) for k in pool.num_replays if k not in replays] == [
        (CHAIN, 4),
        (TREE, 4),
    ]


def test_the_largest_step_is_captured_first_so_that_the_others_fit_into_its_memory(
    pool: GraphPool, passes: LanePasses
) -> None:
    passes.run(pool, OFF, 1)
    assert pool.num_captures == 2
    passes.run(pool, TREE, 8)
    assert pool.num_captures == 3  # its draft


def test_another_layout_drops_the_captures_and_the_same_keeps_them(
    pool: GraphPool, passes: LanePasses
) -> None:
    expected = passes.run(pool, OFF, 8)
    pool.bind(passes.steps())
    passes.reset()
    passes.run(pool, OFF, 8)
    assert pool.num_captures == 2
    elsewhere = make_lane_passes(torch.device("cpu"), torch.float64, num_lanes=9)
    pool.bind(elsewhere.steps())
    passes.cache.kv_LKTH.zero_()  # of the old place, which nobody may read any more
    for output, wanted in zip(elsewhere.run(pool, OFF, 8), expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=0, atol=0)
    assert pool.num_captures == 4
    pool.drop()
    pool.bind(elsewhere.steps())
    elsewhere.run(pool, OFF, 8)
    assert pool.num_captures == 6


def test_whatever_moves_changes_what_is_read_and_new_weights_do_not(passes: LanePasses) -> None:
    def reads() -> Hashable:
        return passes.steps().reads()

    before = reads()
    for name, tensor in list(passes.model.named_hf_tensors()):
        passes.model.load_hf(name, tensor.clone())
    passes.draft.load({name: t * 2.0 for name, t in passes.draft._model.state_dict().items()})
    passes.draft.refresh()
    passes.model.rotary.reserve(LANE)
    assert reads() == before
    seen = {before}
    passes.model.rotary.reserve(4 * LANE + 1)
    seen.add(reads())
    passes.draft.rotary.reserve(4 * LANE + 1)
    seen.add(reads())
    passes.cache.kv_LKTH = passes.cache.kv_LKTH.clone()
    seen.add(reads())
    passes.model.embedding.set_(passes.model.embedding.clone())
    seen.add(reads())
    other = DraftInference(make_draft_model("eagle"))
    seen.add(dataclasses.replace(passes, draft=other).steps().reads())
    for params in (
        SamplingParams(num_samples=1, max_new_tokens=9, temperature=0.5),
        SamplingParams(num_samples=1, max_new_tokens=9, top_p=0.5),
        SamplingParams(num_samples=1, max_new_tokens=9, top_k=5),
        SamplingParams(num_samples=1, max_new_tokens=9, stop_token_ids=(5,)),
    ):
        steps = LaneSteps(passes.model, passes.cache, LANE, passes.draft, params)
        seen.add(steps.reads())
    assert len(seen) == 10


def test_seconds_of_captures_are_known_apart(pool: GraphPool, passes: LanePasses) -> None:
    passes.run(pool, TREE, 8)
    captured_s = pool.capture_s
    assert captured_s > 0.0
    passes.run(pool, TREE, 8)
    assert pool.capture_s == captured_s
