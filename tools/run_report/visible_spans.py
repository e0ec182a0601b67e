"""Converts spans to what a timeline shows: the innermost span at any time, of a few ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from tools.run_report.trace import RankTrace, Span, Window

NUM_ROWS = 8  # ranks that get a row
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


def running_requests(spans: Iterable[Span]) -> dict[int, tuple[list[float], list[int]]]:
    """Return, by rank, when the batch of running requests changed, and its new sizes.

    A pass has the size of its batch. After a rollout it is 0.
    """
    changes: dict[int, list[tuple[float, int]]] = defaultdict(lambda: [(0.0, 0)])
    for span in spans:
        if "batch_size" in span.args:
            changes[span.rank].append((span.start_s, span.args["batch_size"]))
        elif span.phase == "ROLLOUT":
            changes[span.rank].append((span.end_s, 0))
    return {
        rank: ([time_s for time_s, _ in points], [size for _, size in points])
        for rank, points in ((rank, sorted(changes[rank])) for rank in sorted(changes))
        if any(size for _, size in points)
    }


def select_ranks(ranks: Mapping[int, RankTrace], window: Window) -> list[int]:
    """Return all ranks, or of many the slowest, median and fastest by rollout.

    One rank after another is read, and only its rollout spans.
    """
    if len(ranks) <= NUM_ROWS:
        return list(ranks)
    seconds = {
        number: sum(span.end_s - span.start_s for span in rank.spans(window, only="ROLLOUT"))
        for number, rank in ranks.items()
    }
    order = sorted(seconds, key=lambda rank: (-seconds[rank], rank))
    middle = len(order) // 2
    return [*order[:3], *order[middle - 1 : middle + 1], *order[-3:]]
