"""Converts spans to a timeline: the window of some steps, and the innermost span of a lane at any time.

A lane is one row of the timeline. Used by panels.py. A step lasts from one SYNC of the policy to the next (the span's `version`
is the step that it ends). So an evaluation or a checkpoint after step n is drawn at the start of step n + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tools.run_report.data import MAIN_LANE, Span

_RESOLUTION = 4000  # per window: narrower neighbours of one kind are joined
_OPAQUE = "EVAL"  # drawn as one bar, although it decodes and scores like a rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a lane."""

    lane: str
    phase: str
    label: str  # short, for inside the bar: "6_4_16"
    detail: str  # for the tooltip: everything in the span
    start_s: float  # since the start of the window
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some consecutive steps of the trace."""

    start_s: float
    end_s: float
    step_starts: dict[int, float]  # by step

    @property
    def title(self) -> str:
        """ "step 4" or "steps 3-4"."""
        first, last = min(self.step_starts), max(self.step_starts)
        return f"step {first}" if first == last else f"steps {first}-{last}"


def outside_evaluations(spans: Sequence[Span]) -> list[Span]:
    """Drop spans inside an EVAL span of the same lane. The EVAL spans stay."""
    evaluations: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        if span.phase == _OPAQUE:
            evaluations.setdefault((span.rank, span.lane), []).append(span)
    return [
        span
        for span in spans
        if span.phase == _OPAQUE
        or not any(
            outer.start_s <= span.start_s and span.end_s <= outer.end_s
            for outer in evaluations.get((span.rank, span.lane), ())
        )
    ]


def step_spans(spans: Iterable[Span]) -> dict[int, tuple[float, float]]:
    """Return start and end of every step over all ranks. If a resumed run repeated a step, the last time is used."""
    syncs: dict[int, list[Span]] = {}
    for span in spans:
        if span.phase == "SYNC" and "version" in span.args:
            syncs.setdefault(span.rank, []).append(span)
    found: dict[int, list[tuple[float, float]]] = {}
    for of_rank in syncs.values():
        of_rank.sort(key=lambda span: span.start_s)
        latest: dict[int, tuple[float, float]] = {}
        for before, after in pairwise(of_rank):
            version = int(str(after.args["version"]))
            if int(str(before.args["version"])) == version - 1:
                latest[version] = (before.end_s, after.end_s)
        for step, times in latest.items():
            found.setdefault(step, []).append(times)
    return {
        step: (min(t[0] for t in times), max(t[1] for t in times))
        for step, times in sorted(found.items())
    }


def choose_window(spans: Sequence[Span], steps: tuple[int, int] | None) -> Window:
    """Return the window of `steps` (first, last), by default the last two. ValueError for steps that the trace lacks."""
    known = step_spans(spans)
    if not known:
        raise ValueError("trace.json: holds no complete step (no two SYNC spans with a version)")
    last = max(known)
    first = last - 1 if last - 1 in known else last
    if steps is not None:
        first, last = steps
    wanted = range(first, last + 1)
    absent = [step for step in wanted if step not in known]
    if absent or not wanted:
        raise ValueError(
            f"--steps {first}-{last}: the trace holds steps {min(known)} to {max(known)}"
        )
    return Window(
        start_s=known[first][0],
        end_s=known[last][1],
        step_starts={step: known[step][0] - known[first][0] for step in wanted},
    )


def segments_of(spans: Iterable[Span], window: Window) -> list[Segment]:
    """Return what is drawn, lane by lane, ranks ascending. Times count from the start of the window."""
    by_lane: dict[tuple[int, bool, str], list[Span]] = {}
    for span in spans:
        if span.end_s > window.start_s and span.start_s < window.end_s:
            key = (span.rank, span.lane != MAIN_LANE, span.lane)
            by_lane.setdefault(key, []).append(span)
    segments = []
    for key in sorted(by_lane):
        parts = visible_parts(by_lane[key])
        segments += _join_narrow(_cut(parts, window), (window.end_s - window.start_s) / _RESOLUTION)
    return segments


def visible_parts(spans: Sequence[Span]) -> list[tuple[Span, float, float]]:
    """Return (span, start, end) of the innermost span at any time of one lane."""
    parts: list[tuple[Span, float, float]] = []
    open_spans: list[Span] = []
    cursor = 0.0

    def close_until(time_s: float) -> float:
        at = cursor
        while open_spans and open_spans[-1].end_s <= time_s:
            span = open_spans.pop()
            if span.end_s > at:
                parts.append((span, at, span.end_s))
                at = span.end_s
        return at

    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        cursor = close_until(span.start_s)
        if open_spans and span.start_s > cursor:
            parts.append((open_spans[-1], cursor, span.start_s))
        cursor = span.start_s
        open_spans.append(span)
    close_until(float("inf"))
    return parts


def running_requests(
    spans: Iterable[Span], window: Window
) -> dict[int, tuple[list[float], list[int]]]:
    """Return, by rank, the times at which the batch of running requests changed, and its new sizes."""
    by_rank: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        is_inside = span.start_s >= window.start_s and span.end_s <= window.end_s
        if "batch_size" in span.args and is_inside:
            by_rank.setdefault(span.rank, []).append(span)
    width_s = window.end_s - window.start_s
    starts = [start for start in window.step_starts.values() if start > 0]
    curves = {}
    for rank, of_rank in sorted(by_rank.items()):
        times, sizes = [0.0], [0]
        following = [span.start_s - window.start_s for span in of_rank[1:]]
        for span, next_s in zip(of_rank, [*following, math.inf], strict=True):
            end_s = span.end_s - window.start_s
            times.append(span.start_s - window.start_s)
            sizes.append(int(str(span.args["batch_size"])))
            if any(end_s <= start < next_s for start in [*starts, width_s]):
                times.append(end_s)
                sizes.append(0)
        curves[rank] = ([*times, width_s], [*sizes, 0])
    return curves


def _cut(parts: Iterable[tuple[Span, float, float]], window: Window) -> list[Segment]:
    return [
        _segment(
            span,
            max(start_s, window.start_s) - window.start_s,
            min(end_s, window.end_s) - window.start_s,
        )
        for span, start_s, end_s in parts
        if end_s > window.start_s and start_s < window.end_s
    ]


def _segment(span: Span, start_s: float, end_s: float) -> Segment:
    label = span.name.partition("(")[2].removesuffix(")")
    detail = ", ".join(f"{name} {value}" for name, value in span.args.items())
    return Segment(
        lane=f"rank {span.rank}" + ("" if span.lane == MAIN_LANE else f" · {span.lane}"),
        phase=span.phase,
        label=label,
        detail=f"{span.name}: {detail}" if detail else span.name,
        start_s=start_s,
        end_s=end_s,
    )


def _join_narrow(segments: Iterable[Segment], width_s: float) -> list[Segment]:
    """Join neighbours of one phase and label if either would be narrower than `width_s`."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.phase, last.label) == (segment.phase, segment.label)
            and segment.start_s - last.end_s < width_s
            and min(segment.end_s - segment.start_s, last.end_s - last.start_s) < width_s
        ):
            name = f"{last.phase}({last.label})" if last.label else last.phase
            joined[-1] = replace(last, end_s=segment.end_s, detail=f"{name}: several spans")
        else:
            joined.append(segment)
    return joined
