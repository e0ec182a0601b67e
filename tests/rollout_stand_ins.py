"""Rollouts made by hand, and a rollout worker whose engine and rewards are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from tests import policy_batches
from tlt_megatron.engines.base import EngineStats, PassRecord
from tlt_megatron.rewards.worker_process import Outcome
from tlt_megatron.rollout.phases import Phases
from tlt_megatron.rollout.rollout_worker import RolloutWorker
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import SINGLE, Group
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.spot.spot_trainer import SpotReport
from tlt_megatron.types import Prompt, Rollout, RolloutGroup


def make_prompts(draws: Sequence[int], data_source: str = "") -> list[Prompt]:
    """Prompts of two tokens."""
    return [
        Prompt(prompt_id=f"p{draw}", draw_index=draw, token_ids=(1, 2), data_source=data_source)
        for draw in draws
    ]


def make_rollout(prompt: Prompt, token_ids: Sequence[int] = (5,), sample_index: int = 0) -> Rollout:
    """A response that has ended."""
    known = {"prompt_id": prompt.prompt_id, "logprobs": torch.full((len(token_ids),), -0.5)}
    key = prompt.draw_index, sample_index
    return policy_batches.make_rollout(prompt.token_ids, torch.tensor(token_ids), key, **known)


class OneTokenEngine:
    """Answers each prompt with one token."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *_: object,
        on_finish: Callable[[Rollout], None] = lambda rollout: None,
        **__: object,
    ) -> list[RolloutGroup]:
        groups = [RolloutGroup(prompt=each, rollouts=(make_rollout(each),)) for each in prompts]
        for group in groups:
            on_finish(group.rollouts[0])
        return groups

    def take_passes(self) -> list[Any]:
        return []

    def stats(self) -> EngineStats:
        return EngineStats(seconds=1.0)

    def free_kv(self) -> None:
        """It holds none."""


class Rewards:
    """Scores a response by its text. `keys` are those of all responses that were scored."""

    def __init__(self, score: Callable[[str], float] = lambda text: 1.0) -> None:
        self.keys: list[Hashable] = []
        self._score = score
        self._outcomes: dict[Hashable, Outcome] = {}

    def submit(self, key: Hashable, prompt: Prompt, text: str, _: object = None) -> None:
        self.keys.append(key)
        self._outcomes[key] = Outcome(score=self._score(text), details={"own": 1.0})

    def weight_metrics(self) -> dict[str, float]:
        return {}

    def collect(self, should_stop: object) -> dict[Hashable, Outcome]:
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes


def make_passes(sizes: Sequence[int]) -> list[PassRecord]:
    """A plain pass and a pass of each of three strategies, at batches of `sizes`."""
    return [
        PassRecord(
            start_s=0.0,
            seconds=0.0123 * (depth + 1) / size,
            batch_size=size,
            strategy=f"{depth}_1_{depth}" if depth else "off",
            reason="exploit",
            num_committed=3 * size,
            accepted_by_depth=tuple(size - size * d // 8 for d in range(depth)),
        )
        for size in sizes
        for depth in (0, 2, 4, 6)
    ]


class Drafter:
    """The drafter of a rank that needs 4 s after the last rollout until it is free."""

    def add_features(self, *_: object) -> None:
        """Not kept."""

    def add_passes(self, _: object) -> None:
        """Not kept."""

    def run_until_preempted(self, step: int, generation_round: int) -> SpotReport:
        return SpotReport(used_s=1.5, stall_s=4.0, preempt_ms=0.0, sessions=())

    def end_round(self) -> float:
        return 0.0


def make_worker(
    engine: Any, rewards: Rewards, *, world: Group = SINGLE, timeline: Timeline | None = None
) -> RolloutWorker:
    """A worker for which the text of a response is its number of tokens."""
    phases = Phases(
        timeline or Timeline(None, world.rank),
        Progress("none", 1),
        select_device("cpu"),
        on_phase=lambda: None,
    )
    return RolloutWorker(
        engine=engine,
        rewards=rewards,
        decode=lambda ids: str(len(ids)),
        replicas=world,
        phases=phases,
    )
