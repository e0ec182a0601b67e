"""Simulates RL steps: the decode passes of every replica, drafter training on idle ones, and the
phases after.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.selector import StrategySelector, make_selector
from tools.planner.steps import Limits, Request, Step, quotients, shares, stages, tokens_of

# The phases of a step after its rollouts, and "rest", which is what no phase names.
PHASES = (
    *("reward", "publish_drafter", "plan_batch", "values", "old_log_prob", "update_critic"),
    *("update_actor", "update_weights", "rest"),
)
# Replicas that decode pass by pass, and passes that they choose between two ends of responses.
# Further replicas have the mean speed of these, further passes the strategy of most of these.
_NUM_CHOOSING, _MOST_CHOICES = 8, 64


class Machine(Protocol):
    """Recorded (recorded_machine.py) or computed (computed_machine.py)."""

    source: str  # where its numbers are from
    max_updates: float  # optimizer steps of the drafter at the end of the recordings
    prompt_tokens: float  # mean length of a prompt
    updates_per_idle_s: float  # optimizer steps that an idle rank-second brings; 0.0: no training

    def pass_seconds(self, strategy: SpeculationStrategy, batch_size: int, cached: float) -> float:
        """Return the seconds of a pass whose requests have `cached` response tokens in all."""
        ...

    def accepted(self, strategy: SpeculationStrategy, updates: float) -> Sequence[float]:
        """Return the share of requests that accept at least depth d, [d - 1], with a drafter of so
        many optimizer steps.
        """
        ...

    def phase_seconds(self, phase: str, tokens: float) -> float:
        """Return the seconds of a phase with so many response tokens of a replica.

        "gen_rest" is what a rollout takes besides decode passes.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to run the steps."""

    name: str
    strategies: Sequence[SpeculationStrategy] = (OFF,)
    selector: str = "fixed"
    trains_drafter: bool = False
    updates: float = 0.0  # optimizer steps that the drafter begins with


class Passes(NamedTuple):
    """Passes in a row with one strategy and batch size."""

    strategy: SpeculationStrategy
    batch_size: int
    count: float
    seconds: float


Lane = list[Passes]  # a replica in a generation round


@dataclass(slots=True, kw_only=True)
class Prediction:
    """Means over the steps, and the last step in detail."""

    num_steps: int
    trains_drafter: bool
    # seconds of a step; "gen" is the slowest replica's rollout
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle_s: float = 0.0  # rank-seconds of a step
    passes: Counter[tuple[str, int]] = field(default_factory=Counter)  # by strategy and batch size
    last_rounds: list[list[Lane]] = field(default_factory=list)  # without replicas at mean speed
    last_phases: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        return sum(self.phases.values())


def simulate(
    machine: Machine, variant: Variant, steps: Sequence[Step], *, num_replicas: int, limits: Limits
) -> Prediction:
    """Predict these steps, whose responses have known lengths."""
    found = Prediction(num_steps=len(steps), trains_drafter=variant.trains_drafter)
    updates = variant.updates
    selectors = [
        make_selector(variant.selector, variant.strategies, max_batch_size=limits.max_batch)
        for _ in range(min(num_replicas, _NUM_CHOOSING))
    ]
    for step in steps:
        phases: defaultdict[str, float] = defaultdict(float)
        found.last_rounds = []
        for requests in step.rounds:
            decode = _Decode(machine, updates, limits)
            own = shares(requests, num_replicas)
            lanes = [list(decode.run(*each)) for each in zip(own, selectors, strict=False)]
            seconds = [sum(each.seconds for each in lane) for lane in lanes]
            seconds += decode.at_mean_speed(own[len(lanes) :])
            idle_s = sum(max(seconds) - each for each in seconds)
            tokens = sum(request.new for each in requests for request in each) / num_replicas
            phases["gen"] += max(seconds) + machine.phase_seconds("gen_rest", tokens)
            found.idle_s += idle_s / len(steps)
            found.last_rounds.append(lanes)
            for each in (each for lane in lanes for each in lane):
                key = str(each.strategy), each.batch_size
                found.passes[key] += each.count  # pyright: ignore[reportArgumentType]
            if variant.trains_drafter:
                updates += idle_s * machine.updates_per_idle_s
                for selector in selectors:
                    selector.drafter_changed()
        for phase in PHASES:
            if phase != "publish_drafter" or variant.trains_drafter:
                tokens = tokens_of(phase, step.batch) / num_replicas
                phases[phase] += machine.phase_seconds(phase, tokens)
        for phase, seconds in phases.items():
            found.phases[phase] += seconds / len(steps)
        found.last_phases = dict(phases)
    return found


class _Decode:
    """The decode passes of a generation round."""

    def __init__(self, machine: Machine, updates: float, limits: Limits) -> None:
        self.machine, self.updates, self.limits = machine, updates, limits
        self._seconds_B, self._tokens_B = np.zeros((2, limits.max_batch + 1))

    def run(self, requests: Sequence[Request], selector: StrategySelector) -> Iterator[Passes]:
        """Yield the passes of a replica. All its requests advance by the mean gain of a pass."""
        at = end = 0.0  # tokens of a request that runs from the start
        for stage in stages(requests, self.limits):
            size, middle = stage.batch_size, end + stage.tokens / 2
            end += stage.tokens
            chosen: Counter[SpeculationStrategy] = Counter()
            while at < end:
                is_rest = chosen.total() == _MOST_CHOICES
                if is_rest:
                    ((strategy, _),) = chosen.most_common(1)
                else:
                    strategy = selector.choose(size).strategy
                    chosen[strategy] += 1
                accepted = self.machine.accepted(strategy, self.updates)
                gained = 1.0 + sum(accepted)
                count = (end - at) / gained if is_rest else 1.0
                cached = stage.cached + size * (at + is_rest * (end - at) / 2 - middle)
                seconds = self.machine.pass_seconds(strategy, size, cached)
                if not is_rest:
                    by_depth = [round(share * size) for share in accepted]
                    selector.observe(strategy, size, by_depth, seconds)
                self._seconds_B[size] += count * seconds
                self._tokens_B[size] += count * gained
                at += count * gained
                yield Passes(strategy, size, count, count * seconds)

    def at_mean_speed(self, replicas: Sequence[Sequence[Request]]) -> list[float]:
        """Return the seconds of replicas that have the mean speed of those that ran, at each batch
        size.
        """
        token_s_B = quotients(self._seconds_B, self._tokens_B)
        return [
            sum(stage.tokens * token_s_B[stage.batch_size] for stage in stages(own, self.limits))
            for own in replicas
        ]
