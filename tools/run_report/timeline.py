"""Converts spans to the bars of a timeline: the window of some steps, and the innermost span of a thread at any time.

A step lasts from one SYNC of the policy to the next (the span's `version` is the step that it ends). So an evaluation or a
checkpoint after step n is drawn at the start of step n + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from tools.run_report.data import Span

_RESOLUTION = 4000  # per window: narrower neighbours of one kind are joined
_OPAQUE = "EVAL"  # drawn as one bar, although it decodes and scores like a rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some consecutive steps of the trace."""

    start_s: float
    end_s: float
    step_starts: dict[int, float]  # by step, since the start of the window

    @property
    def width_s(self) -> float:
        """Return the seconds between start and end."""
        return self.end_s - self.start_s

    @property
    def title(self) -> str:
        """ "step 4" or "steps 3-4"."""
        first, last = min(self.step_starts), max(self.step_starts)
        return f"step {first}" if first == last else f"steps {first}-{last}"


def choose_window(spans: Sequence[Span], steps: tuple[int, int] | None) -> Window:
    """Return the window of `steps` (first, last), by default the last two. ValueError for steps that the trace lacks."""
    known = step_times(spans)
    if not known:
        raise ValueError("trace.json: holds no complete step (no two SYNC spans with a version)")
    last = max(known)
    first, last = steps or (last - 1 if last - 1 in known else last, last)
    wanted = range(first, last + 1)
    if not wanted or not known.keys() >= set(wanted):
        raise ValueError(
            f"--steps {first}-{last}: the trace holds steps {min(known)} to {max(known)}"
        )
    return Window(
        start_s=known[first][0],
        end_s=known[last][1],
        step_starts={step: known[step][0] - known[first][0] for step in wanted},
    )


def step_times(spans: Iterable[Span]) -> dict[int, tuple[float, float]]:
    """Return start and end of every step over all ranks. If a resumed run repeated a step, the last time is used."""
    syncs = [span for span in spans if span.phase == "SYNC" and "version" in span.args]
    syncs.sort(key=lambda span: (span.rank, span.start_s))
    by_step: dict[int, dict[int, tuple[float, float]]] = {}  # then by rank
    for before, after in pairwise(syncs):
        step = after.args["version"]
        if before.rank == after.rank and before.args["version"] == step - 1:
            by_step.setdefault(step, {})[after.rank] = (before.end_s, after.end_s)
    return {
        step: (min(start for start, _ in times.values()), max(end for _, end in times.values()))
        for step, times in sorted(by_step.items())
    }


def spans_in(spans: Iterable[Span], window: Window) -> list[Span]:
    """Return the spans of the window, cut at its edges and without those inside an evaluation.

    Times count from the start of the window.
    """
    near = [
        replace(
            span,
            start_s=max(span.start_s - window.start_s, 0.0),
            end_s=min(span.end_s, window.end_s) - window.start_s,
        )
        for span in spans
        if span.end_s > window.start_s and span.start_s < window.end_s
    ]
    evaluations = [span for span in near if span.phase == _OPAQUE]
    return [
        span
        for span in near
        if span.phase == _OPAQUE
        or not any(
            outer.row == span.row and outer.start_s <= span.start_s and span.end_s <= outer.end_s
            for outer in evaluations
        )
    ]


def bars_of(spans: Iterable[Span], window: Window) -> list[Span]:
    """Return what is drawn, row by row, ranks ascending."""
    ordered = sorted(spans, key=lambda span: (span.rank, span.row))
    bars: list[Span] = []
    for _, of_row in groupby(ordered, key=lambda span: span.row):
        bars += _join_narrow(visible_parts(list(of_row)), window.width_s / _RESOLUTION)
    return bars


def visible_parts(spans: Sequence[Span]) -> list[Span]:
    """Return the parts of the spans of one thread in which each is the innermost one."""
    parts: list[Span] = []
    open_spans: list[Span] = []
    cursor = -math.inf

    def show_until(time_s: float) -> None:
        nonlocal cursor
        if open_spans and time_s > cursor:
            parts.append(replace(open_spans[-1], start_s=cursor, end_s=time_s))
        cursor = max(cursor, time_s)

    def close_until(time_s: float) -> None:
        while open_spans and open_spans[-1].end_s <= time_s:
            show_until(open_spans[-1].end_s)
            open_spans.pop()

    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        close_until(span.start_s)
        show_until(span.start_s)
        open_spans.append(span)
    close_until(math.inf)
    return parts


def _join_narrow(bars: Iterable[Span], width_s: float) -> list[Span]:
    """Join neighbours of one name if either would be narrower than `width_s`."""
    joined: list[Span] = []
    for bar in bars:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.name == bar.name
            and bar.start_s - last.end_s < width_s
            and min(bar.end_s - bar.start_s, last.end_s - last.start_s) < width_s
        ):
            num_joined = last.args.get("joined spans", 1) + 1
            joined[-1] = replace(last, end_s=bar.end_s, args={"joined spans": num_joined})
        else:
            joined.append(bar)
    return joined


def running_requests(
    spans: Iterable[Span], window: Window
) -> dict[int, tuple[list[float], list[int]]]:
    """Return, by rank, the times at which the batch of running requests changed, and its new sizes."""
    passes = [span for span in spans if "batch_size" in span.args]
    passes.sort(key=lambda span: (span.rank, span.start_s))
    ends = [*(start for start in window.step_starts.values() if start > 0), window.width_s]
    curves = {}
    for rank, group in groupby(passes, key=lambda span: span.rank):
        of_rank = list(group)
        times, sizes = [0.0], [0]
        following = [*(span.start_s for span in of_rank[1:]), math.inf]
        for span, next_s in zip(of_rank, following, strict=True):
            times.append(span.start_s)
            sizes.append(span.args["batch_size"])
            if any(span.end_s <= end < next_s for end in ends):  # the last pass of a step
                times.append(span.end_s)
                sizes.append(0)
        curves[rank] = ([*times, window.width_s], [*sizes, 0])
    return curves
