"""Records the engine's strategy decisions as spans of the trace and rows of
speculation/rank_*.jsonl.

Each rank adds spans to its own timeline, and writes the sums of its passes. A span is a run of
passes with the same strategy and batch size, and a row is their total over a step.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path

from tlt_megatron.engines.base import PassRecord
from tlt_megatron.runtime.metrics import keep_rows, set_aside
from tlt_megatron.runtime.timeline import Timeline

_OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotals:
    """Totals of all passes of one rank with one strategy and batch size; a line of
    speculation/rank_*.jsonl.

    They are sums over a step, or over each of its generation rounds with dynamic sampling.

    Example: `committed / (passes * batch_size)` is the accept length. `accepted_by_depth[0] /
    (passes * batch_size)` is the share of requests, counted once per pass, that accepted at least
    one drafted token.
    """

    step: int
    rank: int
    strategy: str  # "off" for plain passes
    batch_size: int
    passes: int
    seconds: float
    committed: int  # tokens
    accepted_by_depth: tuple[int, ...]  # [d - 1]: accepted >= d drafted tokens, summed over passes
    reasons: dict[str, int]  # number of passes by the selector's reason


def add_pass_spans(timeline: Timeline, passes: Sequence[PassRecord]) -> None:
    """Add a span for each run of passes with the same strategy and batch size: `VERIFY(6_4_16)` or
    `DECODE`.

    Call it inside the phase whose span encloses them, or after it, on the same thread.
    """
    runs = [list(run) for _, run in groupby(passes, key=lambda p: (p.strategy, p.batch_size))]
    for run, following in zip_longest(runs, runs[1:]):
        first, last = run[0], run[-1]
        end_s = last.start_s + last.seconds
        if following:  # the sum may round past the start of the next span, and spans must nest
            end_s = min(end_s, following[0].start_s)
        timeline.add_span(
            "DECODE" if first.strategy == _OFF else f"VERIFY({first.strategy})",
            first.start_s,
            end_s,
            batch_size=first.batch_size,
            passes=len(run),
            committed=sum(p.num_committed for p in run),
            reason=", ".join(dict.fromkeys(p.reason for p in run)),
        )


def sum_passes(passes: Iterable[PassRecord], *, step: int, rank: int) -> list[PassTotals]:
    """Return the totals of one rank's rollout phase by strategy and batch size, the largest batch
    first.
    """
    sums: dict[tuple[int, str], list[PassRecord]] = {}
    for record in passes:
        sums.setdefault((-record.batch_size, record.strategy), []).append(record)
    return [
        PassTotals(
            step=step,
            rank=rank,
            strategy=strategy,
            batch_size=-negative_size,
            passes=len(same),
            seconds=sum(p.seconds for p in same),
            committed=sum(p.num_committed for p in same),
            accepted_by_depth=_add([p.accepted_by_depth for p in same]),
            reasons=dict(Counter(p.reason for p in same)),
        )
        for (negative_size, strategy), same in sorted(sums.items())
    ]


class SpeculationLog:
    """Appends to <run.dir>/speculation/rank_00000.jsonl."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder = folder
        self.path = folder / f"rank_{rank:05d}.jsonl"

    def begin(self, resume_step: int | None) -> None:
        """Cut the rows of all ranks from `resume_step` on. None is for a fresh run, which renames
        the folder of an earlier run.

        Only one rank calls it, before any writes.
        """
        if resume_step is None and self.folder.is_dir():
            set_aside(self.folder)
        for file in sorted(self.folder.glob("rank_?????.jsonl")):
            keep_rows(file, resume_step)

    def write(self, totals: Iterable[PassTotals]) -> None:
        """Append one line per row."""
        lines = [json.dumps(dataclasses.asdict(row)) + "\n" for row in totals]
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))


def _add(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the element-wise sum. A missing depth counts as 0."""
    return tuple(sum(depth) for depth in zip_longest(*counts, fillvalue=0))
