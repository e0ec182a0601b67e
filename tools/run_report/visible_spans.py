"""Converts spans to what a timeline shows: the innermost span at any time, or shares of ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from tools.run_report.trace import RankTrace, Span, Window

NUM_ROWS = 8  # of more ranks, only so many get a row
_RESOLUTION = 4000  # per window: narrower neighbours of one kind are joined
_OPAQUE = "EVAL"  # drawn as one bar, although it decodes and scores like a rollout


def spans_in(spans: Iterable[Span], window: Window) -> list[Span]:
    """Return the spans, cut at the edges of the window and without those inside an evaluation."""
    near = [
        replace(span, start_s=max(span.start_s, 0.0), end_s=min(span.end_s, window.width_s))
        for span in spans
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


def summarize(
    ranks: Sequence[RankTrace], window: Window, num_bins: int
) -> tuple[list[int], dict[str, list[float]]]:
    """Return the slowest, median and fastest ranks by rollout, and the share of all ranks by phase
    and bin of the window.

    One rank after another is read, without its decode passes.
    """
    seconds: dict[int, float] = {}  # of rollout
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * num_bins)
    for rank in ranks:
        spans = spans_in(rank.spans(window, has_passes=False), window)
        seconds[rank.rank] = sum(s.end_s - s.start_s for s in spans if s.phase == "ROLLOUT")
        for bar in bars_of(spans, window):
            _add_to_bins(sums[bar.phase], bar, window.width_s / num_bins)
    order = sorted(seconds, key=lambda rank: (-seconds[rank], rank))
    middle = len(order) // 2
    shares = {phase: [value / len(ranks) for value in of] for phase, of in sums.items()}
    return [*order[:3], *order[middle - 1 : middle + 1], *order[-3:]], shares


def _add_to_bins(bins: list[float], bar: Span, width_s: float) -> None:
    """Add the part of each bin's time that the bar takes."""
    first, last = int(bar.start_s / width_s), min(int(bar.end_s / width_s), len(bins) - 1)
    for number in range(first, last + 1):
        end_s = min(bar.end_s, (number + 1) * width_s)
        bins[number] += max(end_s - max(bar.start_s, number * width_s), 0.0) / width_s
