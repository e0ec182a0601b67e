"""What recorded runs say about a machine and a policy: seconds and tokens of a decode pass, seconds
of the other phases.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from pathlib import Path

import numpy as np

from tlt_megatron.config.load import load_config
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.saved_files import errors_named
from tools.commands.compare_runs import Response, StepRecord, read_run
from tools.planner.simulation import PHASES
from tools.planner.steps import (
    Batch,
    Group,
    Limits,
    cached_by_batch,
    limits_of,
    shares,
    tokens_of,
    whole,
)
from tools.run_report.files import read_lines

_MIN_REQUESTS = 300  # acceptance is their mean; more only if a row has more


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotals:
    """The passes of one rank in a step with one strategy at one batch size: a row of
    speculation/rank_*.jsonl.
    """

    rank: int
    strategy: str
    batch_size: int
    passes: int
    seconds: float
    accepted_by_depth: Sequence[int]
    cached: float = 0.0  # mean response tokens of all running requests, from the lengths

    def __post_init__(self) -> None:
        """ValueError for numbers that no run writes."""
        counts = self.batch_size, self.passes, 1 + min(self.accepted_by_depth, default=0)
        if min(counts) < 1 or not 0.0 <= self.seconds < math.inf:
            raise ValueError(
                f"batch_size={self.batch_size}, passes={self.passes}, seconds={self.seconds}: must be at least 1, 1 and 0"
            )

    @property
    def requests(self) -> int:
        """Return the requests of all passes: one counts once per pass."""
        return self.passes * self.batch_size


_COLUMNS = [name for name in PassTotals.__dataclass_fields__ if name != "cached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A run: of each RL step its metrics, responses and passes."""

    config: RunConfig
    metrics: Sequence[Mapping[str, float]]
    batches: Sequence[Batch]
    passes: Sequence[Sequence[PassTotals]]
    phases: Sequence[Mapping[str, float]]  # seconds by name; see `_phases`
    updates: Sequence[float]  # optimizer steps of the drafter, before each RL step

    @property
    def num_replicas(self) -> int:
        """Return the replicas of the engine. Each has written passes."""
        return len({row.rank for rows in self.passes for row in rows})

    def seconds(self, phase: str) -> float:
        """Return the mean seconds of a phase in a step, on its slowest rank; 0.0 for one that never
        ran.
        """
        return sum(row.get(phase, 0.0) for row in self.phases) / len(self.phases)

    def total(self, metric: str) -> float:
        """Return the sum of a metric over the steps; 0.0 for one that was never written."""
        return sum(row.get(metric, 0.0) for row in self.metrics)


def read_recording(path: Path) -> Recording:
    """Read a run folder. ValueError names what it lacks."""
    for name in ("config.yaml", "metrics.jsonl", "speculation", "rollouts"):
        if not (path / name).exists():
            raise ValueError(
                f"{path}: has no {name}; a run with speculation.enabled=true and logging.rollouts=true is needed"
            )
    with errors_named(path):
        config = load_config(path / "config.yaml")
        run = read_run(path)
        passes: dict[int, list[PassTotals]] = {step: [] for step in run}
        for file in sorted((path / "speculation").glob("rank_?????.jsonl")):
            for row in read_lines(file):
                values = {name: row[name] for name in _COLUMNS}
                passes.get(row["step"], []).append(PassTotals(**values))
        if not all(passes.values()):
            raise ValueError("a step has no decode pass in speculation/")
        batches = list(map(_batch_of, run.values()))
        metrics = [record.metrics for record in run.values()]
        new_updates = (row.get("spot/updates", 0.0) for row in metrics[:-1])
        seconds = (row[name] for row in metrics for name in row if name.startswith("timing_s/"))
        if not all(0.0 <= each < math.inf for each in seconds):
            raise ValueError("a timing_s/ of metrics.jsonl is no number of seconds")
        kv_tokens = limits_of(config.rollout).kv_tokens
        return Recording(
            config=config,
            metrics=metrics,
            batches=batches,
            passes=[
                _with_cached(own, batch, kv_tokens)
                for own, batch in zip(passes.values(), batches, strict=True)
            ],
            phases=list(map(_phases, metrics, passes.values())),
            updates=list(accumulate(new_updates, initial=0.0)),
        )


def _phases(row: Mapping[str, float], passes: Sequence[PassTotals]) -> Mapping[str, float]:
    """Return the seconds of phases by name.

    "gen_rest" is the part of a rollout in which no decode pass ran: prefill, and refreshes of the
    drafter. "rest" is what no phase names.
    """
    start = "timing_s/"
    seconds = {name.removeprefix(start): row[name] for name in row if name.startswith(start)}
    of_rank: Counter[int] = Counter()
    for each in passes:
        of_rank[each.rank] += each.seconds  # pyright: ignore[reportArgumentType]
    named = sum(seconds.get(phase, 0.0) for phase in ("gen", *PHASES))
    gen_rest = max(seconds["gen"] - max(of_rank.values()), 0.0)
    return seconds | {"gen_rest": gen_rest, "rest": max(seconds["step"] - named, 0.0)}


def _batch_of(step: StepRecord) -> Batch:
    """Return the responses of a step by prompt. A run that skips responses skips groups of equal
    rewards.
    """
    skips = step.metrics.get("actor/skipped_response_share", 0.0) > 0.0
    groups: dict[int, list[Response]] = {}
    for (draw_index, _), response in step.responses.items():
        groups.setdefault(draw_index, []).append(response)
    return [
        Group(
            [len(token_ids) for token_ids, _ in own],
            prompt=step.metrics.get("prompt_length/mean", 0.0),
            is_trained=not skips or len({reward for _, reward in own}) > 1,
        )
        for _, own in sorted(groups.items())
    ]


def _with_cached(passes: Sequence[PassTotals], batch: Batch, kv_tokens: float) -> list[PassTotals]:
    """Return the passes of a step with the tokens that their requests had."""
    ranks = sorted({row.rank for row in passes})
    found = []
    (requests,) = whole(batch).rounds
    for rank, own_requests in zip(ranks, shares(requests, len(ranks)), strict=True):
        own = [row for row in passes if row.rank == rank]
        limits = Limits(max(row.batch_size for row in own), kv_tokens)
        cached_B = cached_by_batch(own_requests, limits)
        found += [replace(row, cached=float(cached_B[row.batch_size])) for row in own]
    return found


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
        self.accepted = cache(self._nearest)
        self._phase_lines = {
            phase: _fit_phase(recordings, phase) for phase in ("gen_rest", *PHASES)
        }
        totals = ("bubble/used_s", "bubble/idle_s", "spot/updates")
        used_s, idle_s, updates = (sum(r.total(name) for r in recordings) for name in totals)
        self.updates_per_idle_s = updates / idle_s if used_s else 0.0
        prompts = [group.prompt for r in recordings for batch in r.batches for group in batch]
        self.prompt_tokens = sum(prompts) / len(prompts)
        self.max_updates = max(r.updates[-1] for r in recordings)

    def pass_seconds(self, strategy: SpeculationStrategy, batch_size: int, cached: float) -> float:
        """See `Machine`. ValueError for a strategy that did not run."""
        if strategy not in self._planes:
            ran = ", ".join(map(str, self._planes))
            raise ValueError(
                f"speculation.strategies: {strategy} did not run in the recorded runs, which have {ran}"
            )
        start_s, request_s, token_s = self._planes[strategy]
        return start_s + request_s * batch_size + token_s * cached

    def _nearest(self, strategy: SpeculationStrategy, updates: float) -> list[float]:
        """Return the mean over the passes whose drafter had the most similar number of optimizer
        steps.

        All chains of the learned drafter share the acceptance by depth. A tree and an n-gram chain
        have their own.
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
        return np.cumprod(rates).tolist()

    def phase_seconds(self, phase: str, tokens: float) -> float:
        start_s, slope_s = self._phase_lines[phase]
        return start_s + slope_s * tokens


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
    """Return the plane with the least squared errors of the passes, so that it has the seconds of
    all passes together.
    """
    pass_s, weights = [row.seconds / row.passes for row in rows], [row.passes for row in rows]
    return _fit([[row.batch_size for row in rows], [row.cached for row in rows]], pass_s, weights)


def _fit_phase(recordings: Sequence[Recording], phase: str) -> list[float]:
    x, y = [], []
    for recording in recordings:
        x += [tokens_of(phase, batch) / recording.num_replicas for batch in recording.batches]
        y += [seconds.get(phase, 0.0) for seconds in recording.phases]
    return [sum(y) / len(y), 0.0] if phase == "update_weights" else _fit([x], y, [1.0] * len(x))
