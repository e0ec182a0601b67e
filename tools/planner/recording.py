"""Reads what a simulation needs of a run folder: responses, decode passes, and seconds by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.planner.machine_model import PHASES
from tools.planner.steps import Batch, Group, cached_by_batch, shares, whole
from tools.run_report.data import read_metrics
from tools.run_report.files import errors_named, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotals:
    """The passes of one rank in a step with one strategy at one batch size: a row of
    speculation/rank_*.jsonl.
    """

    step: int
    rank: int
    strategy: str
    batch_size: int
    passes: int
    seconds: float
    accepted_by_depth: Sequence[int]
    cached: float = 0.0  # mean response tokens of all running requests, from the lengths

    @property
    def requests(self) -> int:
        """Return the requests of all passes: one counts once per pass."""
        return self.passes * self.batch_size


_COLUMNS = [name for name in PassTotals.__dataclass_fields__ if name != "cached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A run: of each RL step its metrics, responses and passes."""

    path: Path
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
    for name in ("metrics.jsonl", "speculation", "rollouts"):
        if not (path / name).exists():
            raise ValueError(
                f"{path}: has no {name}; a run with speculation.enabled=true and logging.rollouts=true is needed"
            )
    with errors_named(path):
        metrics = [
            {name: value for name, value in row.items() if value is not None}
            for row in read_metrics(path / "metrics.jsonl")
            if "timing_s/step" in row
        ]
        passes: dict[int, list[PassTotals]] = {int(row["step"]): [] for row in metrics}
        for file in sorted((path / "speculation").glob("rank_?????.jsonl")):
            for row in read_lines(file):
                values = {name: row[name] for name in _COLUMNS}
                passes.get(row["step"], []).append(PassTotals(**values))
        if not all(passes.values()):
            raise ValueError("a step has no decode pass in speculation/")
        batches = [
            _read_batch(path, step, skips=row.get("actor/skipped_response_share", 0.0) > 0.0)
            for step, row in zip(passes, metrics, strict=True)
        ]
        updates, done = [], 0.0
        for row in metrics:
            updates.append(done)
            done += row.get("spot/updates", 0.0)
        return Recording(
            path=path,
            metrics=metrics,
            batches=batches,
            passes=list(map(_with_cached, passes.values(), batches)),
            phases=[_phases(row, passes[int(row["step"])]) for row in metrics],
            updates=updates,
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


def _read_batch(path: Path, step: int, *, skips: bool) -> Batch:
    lengths: dict[int, list[int]] = {}
    rewards: dict[int, set[float]] = {}
    for file in sorted((path / "rollouts").glob(f"step_{step:07d}.*jsonl")):
        for row in read_lines(file):
            lengths.setdefault(row["draw_index"], []).append(len(row["token_ids"]))
            rewards.setdefault(row["draw_index"], set()).add(row["reward"])
    return [
        Group(own, is_trained=not skips or len(rewards[draw]) > 1)
        for draw, own in sorted(lengths.items())
    ]


def _with_cached(passes: Sequence[PassTotals], batch: Batch) -> list[PassTotals]:
    """Return the passes of a step with the tokens that their requests had."""
    ranks = sorted({row.rank for row in passes})
    found = []
    (requests,) = whole(batch).rounds
    for rank, own_requests in zip(ranks, shares(requests, len(ranks)), strict=True):
        own = [row for row in passes if row.rank == rank]
        cached_B = cached_by_batch(own_requests, max(row.batch_size for row in own))
        found += [replace(row, cached=float(cached_B[row.batch_size])) for row in own]
    return found
