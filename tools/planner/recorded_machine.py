"""What recorded runs say about a machine and a policy: seconds and tokens of a decode pass, seconds
of the other phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tools.planner.machine_model import PHASES, Accepted
from tools.planner.recording import PassTotals, Recording
from tools.planner.steps import tokens_of

_MIN_REQUESTS = 300  # of which acceptance is the mean; more only if a row has more


class RecordedMachine:
    """The mean of one or more recordings of one policy on one machine."""

    source = "as recorded"

    def __init__(self, recordings: Sequence[Recording]) -> None:
        rows: dict[str, list[tuple[float, PassTotals]]] = {}
        for recording in recordings:
            for updates, passes in zip(recording.updates, recording.passes, strict=True):
                for row in passes:
                    rows.setdefault(row.strategy, []).append((updates, row))
        self._rows = {SpeculationStrategy.parse(name): found for name, found in rows.items()}
        self._planes = {
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

    def pass_seconds(self, strategy: SpeculationStrategy, batch_size: int, cached: float) -> float:
        start_s, request_s, token_s = self._planes[strategy]
        return start_s + request_s * batch_size + token_s * cached

    def accepted(self, strategy: SpeculationStrategy, updates: float) -> Accepted:
        """Return what a request gains from a pass with a drafter of so many optimizer steps.

        All chains of the learned drafter share the acceptance by depth. A tree and an n-gram chain
        have their own.
        """
        if strategy.is_off:
            return Accepted(tokens=1.0)
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
        requests = 0
        distances = sorted({abs(at - updates) for at, _ in alike})
        for distance in distances:  # all passes of an RL step have the same
            for row in (row for at, row in alike if abs(at - updates) == distance):
                reached = (row.requests, *row.accepted_by_depth)[: strategy.depth + 1]
                tried[: len(reached) - 1] += reached[:-1]
                right[: len(reached) - 1] += reached[1:]
                requests += row.requests
            if requests >= _MIN_REQUESTS:
                break
        rates = right / np.maximum(tried, 1.0)
        for depth in range(1, strategy.depth):
            if not tried[depth]:  # as the depth above
                rates[depth] = rates[depth - 1]
        by_depth = np.cumprod(rates)
        return Accepted(tokens=float(1.0 + by_depth.sum()), by_depth=by_depth.tolist())

    def phase_seconds(self, phase: str, tokens: float) -> float:
        start_s, slope_s = self._phase_lines[phase]
        return start_s + slope_s * tokens

    def check(self, strategies: Sequence[SpeculationStrategy]) -> None:
        """ValueError for strategies that did not run."""
        missing = [str(s) for s in (OFF, *strategies) if s not in self._rows]
        if missing:
            ran = ", ".join(map(str, self._rows))
            raise ValueError(
                f"speculation.strategies: {', '.join(missing)} did not run in the recorded runs, which have {ran}"
            )


def _is_learned_chain(strategy: SpeculationStrategy) -> bool:
    return strategy.is_learned and strategy.is_chain


def _fit(
    columns: Sequence[Sequence[float]], y: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return a start and the slope of each column with the least squared error, none below zero."""
    root_N = np.sqrt(weights)
    x_NC = np.column_stack([np.ones(len(y)), *columns]) * root_N[:, None]
    y_N = np.asarray(y) * root_N
    best, least = np.zeros(len(columns) + 1), np.inf
    # The best fit equals the unconstrained fit over the columns that it uses, so try all subsets.
    for taken in product((True, False), repeat=len(best)):
        own = np.flatnonzero(taken)
        values, *_ = np.linalg.lstsq(x_NC[:, own], y_N, rcond=None)
        error = float(((x_NC[:, own] @ values - y_N) ** 2).sum())
        if (values >= 0.0).all() and error < least:
            best, least = np.zeros(len(best)), error
            best[own] = values
    return best.tolist()


def _fit_seconds(rows: Sequence[PassTotals]) -> list[float]:
    """Return the plane with the least relative errors: short passes count as much as long ones."""
    pass_s = [row.seconds / row.passes for row in rows]
    weights = [row.passes / each**2 for row, each in zip(rows, pass_s, strict=True)]
    return _fit([[row.batch_size for row in rows], [row.cached for row in rows]], pass_s, weights)


def _fit_phase(recordings: Sequence[Recording], phase: str) -> list[float]:
    x, y = [], []
    for recording in recordings:
        x += [tokens_of(phase, batch) / recording.num_replicas for batch in recording.batches]
        y += [seconds.get(phase, 0.0) for seconds in recording.phases]
    return [sum(y) / len(y), 0.0] if phase == "update_weights" else _fit([x], y, [1.0] * len(x))
