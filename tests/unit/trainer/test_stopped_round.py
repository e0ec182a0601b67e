"""A rank that is told to stop in a later generation round of a step: all ranks stop, and the step leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.unit.trainer.test_idle_time import Engine, FixedClock, Rewards
from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.rewards.batch_rules import BatchPlan, BatchRules
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import group_of
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.trainer.loop import RLTrainer
from tlt_megatron.trainer.phases import Phases
from tlt_megatron.trainer.rollout_worker import RolloutWorker
from tlt_megatron.types import Prompt, RolloutGroup, SamplingParams


class StoppedEngine(Engine):
    """Rank 1 is told to stop in the second round, in which it has no prompt of its own."""

    def __init__(self) -> None:
        self.num_rounds = 0

    def generate(self, prompts: Sequence[Prompt], *_: object, **__: object) -> list[RolloutGroup]:
        self.num_rounds += 1
        if self.num_rounds == 2 and dist.get_rank() == 1:
            assert not prompts
            raise GenerationStopped("told to stop")
        return super().generate(prompts)


def test_all_ranks_stop_in_the_round_in_which_one_is_told_to() -> None:
    def draw(count: int) -> list[Prompt]:
        return [Prompt(prompt_id=str(i), draw_index=i, token_ids=(1, 2)) for i in range(count)]

    def body() -> tuple[str, int]:
        world, engine = group_of(dist.group.WORLD), StoppedEngine()
        progress = Progress("none", 1, enabled=False)
        clock = FixedClock(None, world.rank)
        phases = Phases(clock, progress, select_device("cpu"), on_phase=lambda: None)
        worker = RolloutWorker(engine, Rewards(), str, replicas=world, phases=phases)
        # all rewards are equal, so no group is kept and there is a next round
        plan = BatchPlan(
            rules=BatchRules(num_prompts=3, max_rounds=9, metric="reward"), draw=lambda _: draw(1)
        )
        params = SamplingParams(num_samples=1, max_new_tokens=1)
        with pytest.raises(GenerationStopped) as stopped:
            worker.collect(draw(3), params, 0, plan=plan)
        return str(stopped.value), engine.num_rounds

    assert run_ranks(3, body) == [("the rollouts of this phase are dropped", 2)] * 3


class Sampler:
    """Draws 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.drawn = 0

    def next_batch(self, count: int) -> list[int]:
        self.drawn += count
        return list(range(self.drawn - count, self.drawn))

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def test_a_step_that_stops_after_its_first_round_gives_all_its_draws_back() -> None:
    def collect(*_: object, plan: BatchPlan, **__: object) -> Any:
        plan.draw(2)
        raise GenerationStopped("told to stop")

    sampler = Sampler()
    sampler.next_batch(5)
    trainer = RLTrainer(
        SimpleNamespace(
            batch=BatchRules(num_prompts=3, max_rounds=2, metric="reward"),
            sampling=SamplingParams(),
        ),
        sampler=sampler,
        worker=SimpleNamespace(collect=collect, engine=None, phases=None, replicas=None),
        policy_trainer=None,
        drafter=None,
    )
    with pytest.raises(GenerationStopped):
        trainer.train_step()
    assert sampler.drawn == 5
