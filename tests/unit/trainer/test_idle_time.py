"""The idle time of a rollout phase has one definition, with spot training and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tlt_megatron.engines.base import EngineStats
from tlt_megatron.rewards.worker_process import Outcome
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import group_of
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.spot.spot_trainer import SpotReport
from tlt_megatron.trainer.phases import Phases
from tlt_megatron.trainer.rollout_worker import RolloutWorker
from tlt_megatron.types import FinishReason, Prompt, Rollout, RolloutGroup, SamplingParams


class Engine:
    """Answers each prompt with one token."""

    def generate(self, prompts: Sequence[Prompt], *_: object, **__: object) -> list[RolloutGroup]:
        return [RolloutGroup(prompt=prompt, rollouts=(answer(prompt),)) for prompt in prompts]

    def take_passes(self) -> list[Any]:
        return []

    def stats(self) -> EngineStats:
        return EngineStats(seconds=1.0)

    def free_kv(self) -> None:
        """It holds none."""


class Rewards:
    """Each response is worth 1."""

    def collect(self, should_stop: object) -> dict[tuple[int, int], Outcome]:
        return {(draw, 0): Outcome(score=1.0) for draw in range(3)}


class Drafter:
    """Of a rank that needs 4 s after the last rollout until it is free."""

    def add_features(self, *_: object) -> None:
        """Not kept."""

    def run_until_preempted(self, step: int, generation_round: int) -> SpotReport:
        return SpotReport(used_s=1.5, stall_s=4.0, preempt_ms=0.0, sessions=())


class FixedClock(Timeline):
    """Rank r finishes at 10 + 2.5 r."""

    def now_s(self) -> float:
        return 10.0 + 2.5 * dist.get_rank()


def answer(prompt: Prompt) -> Rollout:
    return Rollout(
        prompt_id=prompt.prompt_id,
        draw_index=prompt.draw_index,
        sample_index=0,
        prompt_ids=prompt.token_ids,
        token_ids=torch.tensor([5]),
        logprobs=torch.zeros(1),
        policy_logprobs=torch.zeros(1),
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )


@pytest.mark.parametrize("has_drafter", [False, True])
def test_idle_time_is_from_the_end_of_a_ranks_rollouts_to_the_end_of_the_last_ranks(
    has_drafter: bool,
) -> None:
    prompts = [Prompt(prompt_id=str(i), draw_index=i, token_ids=(1, 2)) for i in range(3)]

    def body() -> dict[str, float]:
        world = group_of(dist.group.WORLD)
        progress = Progress("none", 1, enabled=False)
        clock = FixedClock(None, world.rank)
        phases = Phases(clock, progress, select_device("cpu"), on_phase=lambda: None)
        worker = RolloutWorker(Engine(), Rewards(), str, replicas=world, phases=phases)
        params = SamplingParams(num_samples=1, max_new_tokens=1)
        drafter = Drafter() if has_drafter else None
        return worker.collect(prompts, params, 0, drafter=drafter).metrics

    for metrics in run_ranks(3, body):
        assert metrics["bubble/idle_s"] == 5.0 + 2.5
        assert metrics.get("bubble/used_s") == (3 * 1.5 if has_drafter else None)
