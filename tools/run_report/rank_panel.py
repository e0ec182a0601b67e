"""The first panel of the report: what each of a few ranks did over the time of a step, and below
it, on the same time axis, the long tail.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.run_report import palette
from tools.run_report.data import RunData
from tools.run_report.figure import Json, Panel, declared, make_curve, make_layout
from tools.run_report.trace import Span, Window
from tools.run_report.visible_spans import (
    NUM_ROWS,
    bars_of,
    running_requests,
    select_ranks,
    spans_in,
)

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
