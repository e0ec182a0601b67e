"""What recorded runs say about a machine and a policy: seconds and tokens of a decode pass, seconds
of the other phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tools.planner.recording import PHASES, Batch, Passes, Recording, num_tokens

_MIN_REQUESTS = 300  # of which acceptance is the mean; more only if a row has more
_CONSTANT = ("publish_drafter", "update_weights", "rest")  # whatever the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What a request gains from one pass."""

    tokens: float  # committed, the bonus token included
    by_depth: Sequence[float]  # share of requests that accept at least depth d, [d - 1]


class Machine:
    """The mean of one or more recordings of one policy on one machine."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        rows: dict[str, list[tuple[float, Passes]]] = {}
        for recording in recordings:
            for updates, passes in zip(recording.updates, recording.passes, strict=True):
                for row in passes:
                    rows.setdefault(row.strategy, []).append((updates, row))
        self._rows = {SpeculationStrategy.parse(name): found for name, found in rows.items()}
        self._lines = {
            s: _fit_seconds([row for _, row in found]) for s, found in self._rows.items()
        }
        self._accepted: dict[tuple[SpeculationStrategy, float], Accepted] = {}
        self._phase_lines = {
            phase: _fit_phase(recordings, phase) for phase in ("gen_rest", *PHASES)
        }
        totals = ("bubble/used_s", "bubble/idle_s", "spot/updates")
        used_s, idle_s, updates = (sum(r.total(name) for r in recordings) for name in totals)
        self.updates_per_idle_s = updates / idle_s if used_s else 0.0
        self.max_updates = max(r.updates[-1] for r in recordings)

    def seconds(self, strategy: SpeculationStrategy, batch_size: int) -> float:
        """Return the seconds of a pass."""
        start_s, slope_s = self._lines[strategy]
        return start_s + slope_s * batch_size

    def accepted(self, strategy: SpeculationStrategy, updates: float) -> Accepted:
        """Return what a request gains from a pass with a drafter of so many optimizer steps.

        All chains of the learned drafter share the acceptance by depth. A tree and an n-gram chain
        have their own.
        """
        if strategy.is_off:
            return Accepted(tokens=1.0, by_depth=())
        key = strategy, updates
        if key not in self._accepted:
            self._accepted[key] = self._nearest(strategy, updates)
        return self._accepted[key]

    def _nearest(self, strategy: SpeculationStrategy, updates: float) -> Accepted:
        """Return the mean over the passes whose drafter had the most similar number of optimizer
        steps.
        """
        is_alike = _is_learned_chain if _is_learned_chain(strategy) else strategy.__eq__
        alike = [pair for other, rows in self._rows.items() if is_alike(other) for pair in rows]
        tried, right = np.zeros(strategy.depth), np.zeros(strategy.depth)
        requests = committed = expected = 0
        distances = sorted({abs(at - updates) for at, _ in alike})
        for distance in distances:  # all passes of an RL step have the same
            for row in (row for at, row in alike if abs(at - updates) == distance):
                reached = (row.requests, *row.accepted_by_depth)[: strategy.depth + 1]
                tried[: len(reached) - 1] += reached[:-1]
                right[: len(reached) - 1] += reached[1:]
                requests += row.requests
                committed += row.committed
                expected += row.requests + sum(row.accepted_by_depth)
            if requests >= _MIN_REQUESTS:
                break
        rates = right / np.maximum(tried, 1.0)
        for depth in range(1, strategy.depth):
            if not tried[depth]:  # as the depth above
                rates[depth] = rates[depth - 1]
        by_depth = np.cumprod(rates)
        # The last pass of a response commits less than it accepts.
        tokens = float(1.0 + by_depth.sum()) * committed / expected
        return Accepted(tokens=tokens, by_depth=by_depth.tolist())

    def phase_seconds(self, phase: str, batch: Batch, num_replicas: int) -> float:
        """Return the seconds of a phase: the update by the tokens of a replica that are trained on,
        others by all.
        """
        start_s, slope_s = self._phase_lines[phase]
        return start_s + slope_s * _tokens(phase, batch, num_replicas)

    def check(self, strategies: Sequence[SpeculationStrategy]) -> None:
        """ValueError for strategies that did not run."""
        missing = [str(s) for s in (OFF, *strategies) if s not in self._rows]
        if missing:
            ran = ", ".join(map(str, self._rows))
            raise ValueError(
                f"speculation.strategies: {', '.join(missing)} did not run in the recorded runs, which have {ran}"
            )


def _tokens(phase: str, batch: Batch, num_replicas: int) -> float:
    return num_tokens(batch, trained=phase == "update_actor") / num_replicas


def _is_learned_chain(strategy: SpeculationStrategy) -> bool:
    return strategy.is_learned and strategy.is_chain


def _line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return start and slope of the least-squares line, neither below zero."""
    x_N, y_N, w_N = (np.asarray(values, dtype=float) for values in (x, y, weights))
    mean_x, mean_y = np.average(x_N, weights=w_N), np.average(y_N, weights=w_N)
    spread = np.average((x_N - mean_x) ** 2, weights=w_N)
    slope = np.average((x_N - mean_x) * (y_N - mean_y), weights=w_N) / spread if spread else 0.0
    if mean_y - slope * mean_x < 0.0:  # through the origin
        return 0.0, float(np.average(x_N * y_N, weights=w_N) / np.average(x_N**2, weights=w_N))
    slope = max(slope, 0.0)
    return float(mean_y - slope * mean_x), float(slope)


def _fit_seconds(rows: Sequence[Passes]) -> tuple[float, float]:
    return _line(
        [row.batch_size for row in rows],
        [row.seconds / row.passes for row in rows],
        [row.passes for row in rows],
    )


def _fit_phase(recordings: Sequence[Recording], phase: str) -> tuple[float, float]:
    x, y = [], []
    for recording in recordings:
        x += [_tokens(phase, batch, recording.num_replicas) for batch in recording.batches]
        y += [seconds.get(phase, 0.0) for seconds in recording.phases]
    return (sum(y) / len(y), 0.0) if phase in _CONSTANT else _line(x, y, [1.0] * len(x))
