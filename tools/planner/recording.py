"""Reads what a simulation needs of a run folder: responses, decode passes, and seconds by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.run_report.data import read_metrics
from tools.run_report.files import errors_named, read_lines

# The phases of a step after its rollouts, and "rest", which is what no phase names.
PHASES = (
    *("reward", "publish_drafter", "values", "old_log_prob", "update_critic"),
    *("update_actor", "update_weights", "rest"),
)


class Group(NamedTuple):
    """The responses to one prompt."""

    lengths: list[int]  # in tokens
    is_trained: bool = True  # False: all rewards are equal, so the update skips them


Batch = list[Group]  # of an RL step


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The passes of one rank in a step with one strategy at one batch size: a row of
    speculation/rank_*.jsonl.
    """

    step: int
    rank: int
    strategy: str
    batch_size: int
    passes: int
    seconds: float
    committed: int
    accepted_by_depth: Sequence[int]

    @property
    def requests(self) -> int:
        """Return the requests of all passes: one counts once per pass."""
        return self.passes * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A run: of each RL step its metrics, responses and passes."""

    path: Path
    metrics: Sequence[Mapping[str, float]]
    batches: Sequence[Batch]
    passes: Sequence[Sequence[Passes]]
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
        passes: dict[int, list[Passes]] = {int(row["step"]): [] for row in metrics}
        for file in sorted((path / "speculation").glob("rank_?????.jsonl")):
            for row in read_lines(file):
                values = {name: row[name] for name in Passes.__dataclass_fields__}
                passes.get(row["step"], []).append(Passes(**values))
        if not all(passes.values()):
            raise ValueError("a step has no decode pass in speculation/")
        updates, done = [], 0.0
        for row in metrics:
            updates.append(done)
            done += row.get("spot/updates", 0.0)
        return Recording(
            path=path,
            metrics=metrics,
            batches=[
                _read_batch(path, step, skips=row.get("actor/skipped_response_share", 0.0) > 0.0)
                for step, row in zip(passes, metrics, strict=True)
            ],
            passes=list(passes.values()),
            phases=[_phases(row, passes[int(row["step"])]) for row in metrics],
            updates=updates,
        )


def _phases(row: Mapping[str, float], passes: Sequence[Passes]) -> Mapping[str, float]:
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


def num_tokens(batch: Batch, *, trained: bool = False) -> int:
    """Return the response tokens of a batch, or of the groups that the update trains on."""
    return sum(sum(each.lengths) for each in batch if each.is_trained or not trained)
