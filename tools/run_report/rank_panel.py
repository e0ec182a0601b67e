"""The first panel of the report: what each of a few ranks did over the time of a step, and below
it, on the same time axis, the long tail.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from tools.run_report import palette
from tools.run_report.data import RunData
from tools.run_report.figure import Json, Panel, declared, make_curve, make_layout
from tools.run_report.trace import RankTrace, Span, Window

NUM_ROWS = 8  # ranks that get a row
_RESOLUTION = 4000  # per window: narrower neighbours of one kind are joined
_OPAQUE = "EVAL"  # drawn as one bar, although it decodes and scores like a rollout
_CHOICE = " From the top: the slowest three, two median and the fastest three rollouts."
_ROW_HEIGHT, _TAIL_HEIGHT, _MARGINS = 46, 200, 130  # pixels


def build_rank_panel(run: RunData, steps: tuple[int, int] | None) -> Panel:
    """Return the timeline of `steps`, by default of the last two, with the requests that decode."""
    assert run.trace is not None, "the run was not read"
    run.trace.scan()
    if steps is None and not run.trace.has_steps():
        return Panel(title="Timeline", absent="The trace holds no complete step.")
    window = run.trace.window(steps)
    # a resumed run may have fewer ranks
    ranks = {n: r for n, r in run.trace.ranks.items() if window.step_starts.keys() & r.steps.keys()}
    shown = select_ranks(ranks, window)
    spans = [span for rank in shown for span in spans_in(ranks[rank].spans(window), window)]
    bars = sorted(bars_of(spans, window), key=lambda bar: shown.index(bar.rank))
    rows = list(dict.fromkeys(bar.row for bar in bars))
    curves = [
        make_curve(f"running on rank {rank}", color, points, shape="hv") | {"yaxis": "y2"}
        for (rank, points), color in zip(
            running_requests(spans).items(), palette.CURVES, strict=False
        )
    ]
    which = f"{len(shown)} of {len(ranks):,} ranks" if len(ranks) > NUM_ROWS else "every rank"
    return Panel(
        key="timeline",
        title=f"What {which} did in {window.title}, and the long tail",
        note="Innermost span at any time; point at a bar for batch size, strategy and reason. Below: requests that still"
        " decode. A step ends when the engines hold its policy, so an evaluation is drawn at the start of the next one."
        + (_CHOICE if len(ranks) > NUM_ROWS else ""),
        data=[*_bars_by_phase(bars), *curves],
        layout=_layout(window, rows),
        is_wide=True,
    )


def _layout(window: Window, rows: Sequence[str]) -> Json:
    """Return the rows of the timeline above the tail, and a line where a step starts."""
    height = _ROW_HEIGHT * len(rows) + _TAIL_HEIGHT
    border = _TAIL_HEIGHT / height
    line = declared()["timeline"]["line"]
    return make_layout(
        f"seconds since the start of step {min(window.step_starts)}",
        "",
        x={"range": [0, window.width_s], "anchor": "y2"},
        y={"categoryarray": rows[::-1], "showgrid": False, "domain": [border, 1]},
        yaxis2={"title": {"text": "running requests"}, "domain": [0, 0.85 * border]},
        height=height + _MARGINS,
        shapes=[line | {"x0": at, "x1": at} for at in window.step_starts.values() if at > 0],
        **declared()["timeline"]["layout"],
    )


def _bars_by_phase(bars: Sequence[Span]) -> list[Json]:
    """Return the bars of each phase; unknown phases come last."""
    colors = {phase: getattr(palette, name) for phase, name in declared()["phases"].items()}
    found: dict[str, list[Span]] = {phase: [] for phase in colors}
    for bar in bars:
        found.setdefault(bar.phase, []).append(bar)
    return [
        {
            **declared()["timeline"]["bar"],
            "name": phase,
            "y": [bar.row for bar in of_phase],
            "base": [bar.start_s for bar in of_phase],
            "x": [bar.end_s - bar.start_s for bar in of_phase],
            "text": [bar.label for bar in of_phase],
            "customdata": [_detail(bar) for bar in of_phase],
            "marker": {"color": colors.get(phase, palette.OTHER), "line": {"width": 0}},
        }
        for phase, of_phase in found.items()
        if of_phase
    ]


def _detail(bar: Span) -> str:
    detail = ", ".join(f"{name} {value}" for name, value in bar.args.items())
    return f"{bar.name}: {detail}" if detail else bar.name


# ---- spans


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
    cursor = -math.inf  # everything before it is drawn
    for span in [*sorted(spans, key=lambda span: (span.start_s, -span.end_s)), None]:
        start_s = math.inf if span is None else span.start_s
        while open_spans and cursor < start_s:
            end_s = min(open_spans[-1].end_s, start_s)
            if end_s > cursor:
                parts.append(replace(open_spans[-1], start_s=cursor, end_s=end_s))
                cursor = end_s
            if open_spans[-1].end_s <= start_s:
                open_spans.pop()
        if span is not None:
            cursor = max(cursor, start_s)
            open_spans.append(span)
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
