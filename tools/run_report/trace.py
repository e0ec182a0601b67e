"""Reads the spans of any number of ranks from <run dir>/timeline, while the files grow.

Files are scanned once, from where the last scan ended, for the places where steps end in them. The
spans of a window of steps are then read from those places.

A step lasts from one SYNC of the policy to the next (the span's `version` is the step that it
ends). So an evaluation or a checkpoint after step n is drawn at the start of step n + 1.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tlt_megatron.saved_files import errors_named, open_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of a rank."""

    rank: int
    row: str  # in the timeline: "rank 0", or "rank 0 · spot" for another thread
    name: str  # "VERIFY(6_4_16)"
    start_s: float  # since the start of the window
    end_s: float
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """Return the name without the part in brackets: "VERIFY"."""
        return self.name.partition("(")[0]

    @property
    def label(self) -> str:
        """Return what stands in brackets: "6_4_16"."""
        return self.name.partition("(")[2].removesuffix(")")


class _Step(NamedTuple):
    start_ns: int
    end_ns: int
    first_byte: int
    end_byte: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some consecutive steps of the trace."""

    start_ns: int
    width_s: float
    step_starts: dict[int, float]  # by step, in seconds since the start of the window

    @property
    def title(self) -> str:
        """ "step 4" or "steps 3-4"."""
        first, last = min(self.step_starts), max(self.step_starts)
        return f"step {first}" if first == last else f"steps {first}-{last}"


class RankTrace:
    """The file of one rank. If a resumed run repeated a step, the last time is used."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.steps: dict[int, _Step] = {}
        self.size = 0  # bytes that were scanned, whole lines
        self._synced: tuple[int, int, int] | None = None  # newest SYNC: version, end_ns, end byte

    def scan(self) -> None:
        """Find the steps in what was appended since the last scan.

        ValueError names a file that is no timeline.
        """
        with errors_named(self.path), open_regular(self.path) as file:
            file.seek(self.size)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.size += len(line)
                if b'"name": "SYNC"' in line and (event := _parse(line)):
                    self._add_sync(event)

    def _add_sync(self, event: dict[str, Any]) -> None:
        if "version" not in event["args"]:
            return
        version, end_ns = event["args"]["version"], event["start_ns"] + event["dur_ns"]
        if self._synced is not None and self._synced[0] == version - 1:
            _, start_ns, first_byte = self._synced
            self.steps[version] = _Step(start_ns, end_ns, first_byte, self.size)
        self._synced = version, end_ns, self.size

    def spans(self, window: Window, *, only: str = "") -> list[Span]:
        """Return the spans of the window in the order of a trace: parents before children.

        `only` is a name: spans of other names are not even parsed.
        """
        steps = [self.steps[step] for step in window.step_starts if step in self.steps]
        if not steps:
            return []
        is_newest = max(self.steps) in window.step_starts
        first_byte, end_byte = steps[0].first_byte, self.size if is_newest else steps[-1].end_byte
        wanted = f'"name": "{only}'.encode()
        with errors_named(self.path), open_regular(self.path) as file:
            file.seek(first_byte)
            lines = [x for x in file.read(end_byte - first_byte).splitlines() if wanted in x]
            events = [event for event in map(_parse, reversed(lines)) if event]
            spans = [self._span(event, window.start_ns) for event in events]
        spans = [s for s in spans if s.end_s > 0 and s.start_s < window.width_s]
        return sorted(spans, key=lambda span: (span.start_s, -span.end_s))  # parents end last

    def _span(self, event: dict[str, Any], origin_ns: int) -> Span:
        lane, start_ns = event["lane"], event["start_ns"] - origin_ns
        return Span(
            rank=self.rank,
            row=f"rank {self.rank}" + ("" if lane == "MainThread" else f" · {lane}"),
            name=event["name"],
            start_s=start_ns / 1e9,
            end_s=(start_ns + event["dur_ns"]) / 1e9,
            args=event["args"],
        )


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the span; None for a line that a killed rank left unfinished."""
    try:
        return json.loads(line)
    except ValueError:
        return None


class Trace:
    """The files of all ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ranks: dict[int, RankTrace] = {}

    def scan(self) -> None:
        """Read what was appended since the last scan."""
        for path in sorted(self._folder.glob("rank_*.jsonl")):
            number, size = int(path.stem.removeprefix("rank_")), path.stat().st_size
            rank = self.ranks.get(number)
            if rank is None or size < rank.size:  # a fresh run in the same folder
                rank = self.ranks[number] = RankTrace(path, number)
            if size > rank.size:
                rank.scan()

    def has_steps(self) -> bool:
        """Return whether any rank has a complete step."""
        return any(rank.steps for rank in self.ranks.values())

    def window(self, steps: tuple[int, int] | None) -> Window:
        """Return the window of `steps` (first, last), by default of the last two.

        ValueError for steps that the trace lacks.

        A last step that some ranks have not written yet is left out.
        """
        counts = Counter(step for rank in self.ranks.values() for step in rank.steps)
        if not counts:
            raise ValueError(
                f"{self._folder}: holds no complete step (no two SYNC spans with a version)"
            )
        last = max(counts)
        if counts[last] < counts[last - 1]:
            last -= 1
        first, last = steps or (last - 1 if last - 1 in counts else last, last)
        wanted = range(first, last + 1)
        if not wanted or not counts.keys() >= set(wanted):
            raise ValueError(
                f"--steps {first}-{last}: the trace holds steps {min(counts)} to {max(counts)}"
            )
        times = {
            step: [rank.steps[step] for rank in self.ranks.values() if step in rank.steps]
            for step in wanted
        }
        starts = {step: min(time.start_ns for time in of) for step, of in times.items()}
        return Window(
            start_ns=starts[first],
            width_s=(max(time.end_ns for time in times[last]) - starts[first]) / 1e9,
            step_starts={step: (start - starts[first]) / 1e9 for step, start in starts.items()},
        )
