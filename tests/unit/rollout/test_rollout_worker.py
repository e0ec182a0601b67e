"""Rounds of rollouts on stand-ins: idle time, a stop in a later round, and the rounds that measure
the gain.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.rollout_stand_ins import Drafter, OneTokenEngine, Rewards, make_prompts, make_worker
from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.rollout.batch_rules import BatchPlan, BatchRules
from tlt_megatron.rollout.gain import measure_gain
from tlt_megatron.runtime.process_groups import group_of
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.types import Prompt, RolloutGroup, SamplingParams

PARAMS = SamplingParams(num_samples=1, max_new_tokens=1)


class FixedClock(Timeline):
    """Rank r finishes at 10 + 2.5 r."""

    def now_s(self) -> float:
        return 10.0 + 2.5 * dist.get_rank()


@pytest.mark.parametrize("has_drafter", [False, True])
def test_idle_time_is_from_the_end_of_a_ranks_rollouts_to_the_end_of_the_last_ranks(
    has_drafter: bool,
) -> None:
    def body() -> dict[str, float]:
        world = group_of(dist.group.WORLD)
        clock = FixedClock(None, world.rank)
        worker = make_worker(OneTokenEngine(), Rewards(), world=world, timeline=clock)
        drafter: Any = Drafter() if has_drafter else None
        return worker.collect(make_prompts(range(3)), PARAMS, 0, drafter=drafter).metrics

    for metrics in run_ranks(3, body):
        assert metrics["bubble/idle_s"] == 5.0 + 2.5
        assert metrics.get("bubble/used_s") == (3 * 1.5 if has_drafter else None)


class StoppedEngine(OneTokenEngine):
    """Rank 1 is told to stop in the second round, in which it has no prompt of its own."""

    num_rounds = 0

    def generate(self, prompts: Sequence[Prompt], *_: object, **more: Any) -> list[RolloutGroup]:
        self.num_rounds += 1
        if self.num_rounds == 2 and dist.get_rank() == 1:
            assert not prompts
            raise GenerationStopped("told to stop")
        return super().generate(prompts, **more)


def test_all_ranks_stop_in_the_round_in_which_one_is_told_to() -> None:
    def body() -> tuple[str, int]:
        engine = StoppedEngine()
        worker = make_worker(engine, Rewards(), world=group_of(dist.group.WORLD))
        # all rewards are equal, so no group is kept and there is a next round
        rules = BatchRules(num_prompts=3, max_rounds=9, metric="reward")
        plan = BatchPlan(rules=rules, draw=lambda _: make_prompts([3]))
        with pytest.raises(GenerationStopped) as stopped:
            worker.collect(make_prompts(range(3)), PARAMS, 0, plan=plan)
        return str(stopped.value), engine.num_rounds

    assert run_ranks(3, body) == [("the rollouts of this phase are dropped", 2)] * 3


class RecordingEngine(OneTokenEngine):
    """Notes what it is asked to answer, with speculation and without."""

    def __init__(self) -> None:
        self.is_on = True
        self.asked: list[tuple[bool, list[int]]] = []

    def pause_speculation(self, is_paused: bool) -> bool:
        self.is_on = not is_paused
        return True

    def generate(self, prompts: Sequence[Prompt], *_: object, **__: object) -> list[RolloutGroup]:
        self.asked.append((self.is_on, [p.draw_index for p in prompts]))
        return super().generate(prompts)


def test_the_gain_is_measured_on_the_same_prompts_and_no_prompt_comes_back() -> None:
    """Each way also generates a batch that is not timed: the switch dropped its captured graphs."""
    engine, indices = RecordingEngine(), itertools.count(100)

    def draw(count: int) -> list[Prompt]:
        return make_prompts(list(itertools.islice(indices, count)))

    gain = measure_gain(make_worker(engine, Rewards()), [2, 1], draw, PARAMS, policy_version=3)
    rounds = [[[100, 101], [102, 103], [104]], [[105, 106], [107, 108], [109]]]
    expected = [(is_on, each) for batches in rounds for is_on in (True, False) for each in batches]
    assert engine.asked == expected
    assert engine.is_on
    assert gain.num_differing == 0
