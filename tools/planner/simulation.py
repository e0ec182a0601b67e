"""Simulates RL steps: the decode passes of every replica, drafter training on idle ones, and the
phases after.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.selector import StrategySelector, make_selector
from tools.planner.recorded_machine import Machine
from tools.planner.recording import PHASES, Batch

_PASS_BY_PASS = (
    8  # replicas; further ones decode with the mean speed that these have at a batch size
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to run the steps."""

    name: str
    strategies: Sequence[SpeculationStrategy] = ()  # none: without speculation
    selector: str = "cost_model"
    trains_drafter: bool = False
    updates: float = 0.0  # optimizer steps that the drafter begins with


@dataclass(slots=True, kw_only=True)
class Prediction:
    """Sums over the steps."""

    num_steps: int = 0
    # seconds; "gen" is the slowest replica's rollout
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle_s: float = 0.0  # rank-seconds
    updates: float = 0.0  # optimizer steps of the drafter, at the end
    passes: Counter[tuple[str, int]] = field(default_factory=Counter)  # by strategy and batch size

    @property
    def step_s(self) -> float:
        """Return the mean seconds of a step."""
        return sum(self.phases.values()) / self.num_steps


class _Speeds:
    """Seconds per token of a request, by batch size: what the replicas had that were simulated pass
    by pass.
    """

    def __init__(self, max_batch: int) -> None:
        self.seconds_B = np.zeros(max_batch + 1)
        self.tokens_B = np.zeros(max_batch + 1)

    def add(self, batch_size: int, seconds: float, tokens: float) -> None:
        self.seconds_B[batch_size] += seconds
        self.tokens_B[batch_size] += tokens

    def per_token_B(self) -> np.ndarray:
        """Return the quotients; batch sizes that never ran are interpolated."""
        (seen,) = np.nonzero(self.tokens_B)
        speeds = self.seconds_B[seen] / self.tokens_B[seen]
        return np.interp(np.arange(len(self.tokens_B)), seen, speeds)


def simulate(
    machine: Machine, variant: Variant, steps: Sequence[Batch], *, num_replicas: int, max_batch: int
) -> Prediction:
    """Predict these steps, whose responses have known lengths. Each replica answers an equal share
    of the prompts.
    """
    found = Prediction(num_steps=len(steps), updates=variant.updates)
    count = min(num_replicas, _PASS_BY_PASS)
    selectors = [
        make_selector(variant.selector, variant.strategies, max_batch_size=max_batch)
        for _ in range(count if variant.strategies else 0)
    ]
    for batch in steps:
        shares = _shares(batch, num_replicas)
        speeds = _Speeds(max_batch)
        seconds = []
        for number, lengths in enumerate(shares):
            if number < count:
                selector = selectors[number] if selectors else None
                decode = _Decode(machine, selector, found.updates, max_batch)
                seconds.append(decode.run(lengths, speeds, found.passes))
            else:
                if number == count:
                    per_token_B = speeds.per_token_B()
                seconds.append(_drain(lengths, per_token_B, max_batch))
        gen_s = max(seconds)
        found.phases["gen"] += gen_s + machine.phase_seconds("gen_rest", batch, num_replicas)
        idle_s = sum(gen_s - each for each in seconds)
        found.idle_s += idle_s
        if variant.trains_drafter:
            found.updates += idle_s * machine.updates_per_idle_s
            for selector in selectors:
                selector.drafter_changed()
        for phase in PHASES:
            if phase != "publish_drafter" or variant.trains_drafter:
                found.phases[phase] += machine.phase_seconds(phase, batch, num_replicas)
    return found


def _shares(batch: Batch, num_replicas: int) -> list[list[int]]:
    """Return the lengths of each replica's responses. As in a run, replicas take prompts in
    turn.
    """
    return [
        [length for group in batch[replica::num_replicas] for length in group.lengths]
        for replica in range(num_replicas)
    ]


class _Decode:
    """The decode passes of one replica in one step."""

    def __init__(
        self, machine: Machine, selector: StrategySelector | None, updates: float, max_batch: int
    ) -> None:
        self.machine, self.selector = machine, selector
        self.updates, self.max_batch = updates, max_batch

    def run(
        self, lengths: Sequence[int], speeds: _Speeds, passes: Counter[tuple[str, int]]
    ) -> float:
        """Return the seconds. Requests wait while `max_batch` run; the first token comes from the
        prefill.
        """
        left_N = np.maximum(np.asarray(lengths, dtype=float) - 1.0, 0.0)
        running, waiting = left_N[: self.max_batch], left_N[self.max_batch :]
        total_s = 0.0
        while len(running := running[running > 0.0]) or len(waiting):
            room = self.max_batch - len(running)
            running, waiting = np.concatenate([running, waiting[:room]]), waiting[room:]
            batch_size = len(running)
            strategy = self.selector.choose(batch_size).strategy if self.selector else OFF
            seconds = self.machine.seconds(strategy, batch_size)
            gained = self.machine.accepted(strategy, self.updates)
            if self.selector:
                counts = [round(share * batch_size) for share in gained.by_depth]
                self.selector.observe(strategy, batch_size, counts, seconds)
            speeds.add(batch_size, seconds, gained.tokens)
            passes[str(strategy), batch_size] += 1
            running = running - gained.tokens
            total_s += seconds
        return total_s


def _drain(lengths: Sequence[int], per_token_B: np.ndarray, max_batch: int) -> float:
    """Return the seconds of a replica whose requests all advance at the speed of the batch size,
    from one end to the next.
    """
    left = sorted(max(length - 1.0, 0.0) for length in lengths[:max_batch])
    waiting = list(lengths[max_batch:])
    total_s = done = 0.0  # tokens that a request has gained that runs from the start
    while left:
        end = left.pop(0)
        total_s += (end - done) * per_token_B[len(left) + 1]
        done = end
        if waiting:
            left.append(done + max(waiting.pop(0) - 1.0, 0.0))
            left.sort()
    return total_s
