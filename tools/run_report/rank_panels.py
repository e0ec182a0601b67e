"""The panels of what ranks did: a row for each of a few ranks, or shares of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.run_report import palette
from tools.run_report.data import RunData
from tools.run_report.figure import Json, Panel, make_curve, make_layout, make_share_map
from tools.run_report.trace import Span, Window
from tools.run_report.visible_spans import NUM_ROWS, bars_of, running_requests, spans_in, summarize

_PHASES = {  # of the timeline, in the order of its legend
    "DECODE": palette.SKY,
    "VERIFY": palette.BLUE,
    "ROLLOUT": palette.PALE,
    "IDLE / WAIT": palette.GREY,
    "DRAFT-TRAIN": palette.ORANGE,
    "PREEMPT": palette.VERMILLION,
    "REWARD": palette.PURPLE,
    "VALUES": palette.OTHER,
    "LOGPROB": palette.YELLOW,
    "CRITIC": palette.MINT,
    "UPDATE": palette.GREEN,
    "SYNC": palette.BLACK,
    "EVAL": palette.VIOLET,
    "CHECKPOINT": palette.BROWN,
    "PUBLISH": palette.SALMON,
}
_NUM_BINS = 300  # of the time of a window, for shares of many ranks
_BAR_HEIGHT = 46


def build_rank_panels(run: RunData, steps: tuple[int, int] | None) -> list[Panel]:
    """Return the timeline and the long tail of `steps`; of many ranks also how many are in each
    phase.
    """
    if run.trace is None:
        return [Panel(title="Timeline", absent="The run kept no trace (logging.trace=false).")]
    if steps is None and not run.trace.has_steps():
        return [Panel(title="Timeline", absent="The trace holds no complete step.")]
    window = run.trace.window(steps)
    # a resumed run may have fewer ranks
    ranks = {n: r for n, r in run.trace.ranks.items() if window.step_starts.keys() & r.steps.keys()}
    shown, shares = list(ranks), {}
    if len(ranks) > NUM_ROWS:
        shown, shares = summarize(list(ranks.values()), window, _NUM_BINS)
    spans = [s for rank in shown for s in spans_in(ranks[rank].spans(window), window)]
    panels: list[Panel] = [_timeline(spans, window, shown, len(ranks))]
    if shares:
        panels.append(_crowd(shares, window, len(ranks)))
    curves = [
        make_curve(f"rank {rank}", palette.RANKS[shown.index(rank)], points, shape="hv")
        for rank, points in running_requests(spans, window).items()
    ]
    if curves:
        layout = make_layout(_x_label(window), "requests", height=240, **_wide(window))
        panels.append(
            Panel(
                key="running",
                title="The long tail: requests still decoding",
                note="Size of each rank's batch, on the time axis of the timeline.",
                data=curves,
                layout=layout,
                is_wide=True,
            )
        )
    return panels


def _x_label(window: Window) -> str:
    return f"seconds since the start of step {min(window.step_starts)}"


def _wide(window: Window) -> Json:
    """Return settings of a wide panel over time. Margins are equal, so that time axes line up."""
    x = {"range": [0, window.width_s], "automargin": "height"}  # labels must not narrow the plot
    return {"margin": {"l": 110, "r": 24, "t": 8, "b": 10}, "x": x}


def _timeline(spans: Sequence[Span], window: Window, shown: Sequence[int], num_ranks: int) -> Panel:
    bars = sorted(bars_of(spans, window), key=lambda bar: shown.index(bar.rank))
    rows = list(dict.fromkeys(bar.row for bar in bars))
    line = {"type": "line", "y0": 0, "y1": 1, "yref": "paper"}
    line["line"] = {"color": palette.BLACK, "width": 1, "dash": "dot"}
    starts = [start for start in window.step_starts.values() if start > 0]
    which = f"{len(shown)} of {num_ranks:,} ranks" if num_ranks > len(shown) else "every rank"
    choice = " From the top: the slowest three, two median and the fastest three rollouts."
    return Panel(
        key="timeline",
        title=f"What {which} did in {window.title}",
        note="Innermost span at any time; point at a bar for batch size, strategy and reason. A step ends when the engines"
        " hold its policy, so an evaluation is drawn at the start of the next one."
        + (choice if num_ranks > len(shown) else ""),
        data=_bars_by_phase(bars),
        layout=make_layout(
            _x_label(window),
            "",
            y={"categoryorder": "array", "categoryarray": rows[::-1], "showgrid": False},
            barmode="overlay",
            bargap=0.25,
            hovermode="closest",
            height=120 + _BAR_HEIGHT * len(rows),
            shapes=[line | {"x0": start, "x1": start} for start in starts],
            uniformtext={"mode": "hide", "minsize": 12},  # a bar too narrow for its label has none
            **_wide(window),
        ),
        is_wide=True,
    )


def _crowd(shares: Mapping[str, Sequence[float]], window: Window, num_ranks: int) -> Panel:
    known = [phase for label in _PHASES for phase in label.split(" / ") if phase in shares]
    phases = [*known, *sorted(shares.keys() - set(known))][::-1]
    bin_s = window.width_s / _NUM_BINS
    return Panel(
        key="crowd",
        title=f"Share of all {num_ranks:,} ranks in each phase",
        note="A rank that trains the drafter while it waits counts in both.",
        data=[
            make_share_map(
                [(number + 0.5) * bin_s for number in range(_NUM_BINS)],
                phases,
                [[round(share, 3) for share in shares[phase]] for phase in phases],
                hovertemplate="%{y} at %{x:.1f} s: %{z:.1%}<extra></extra>",
                showscale=False,  # it would make the time axis shorter than those of the other panels
            )
        ],
        layout=make_layout(
            _x_label(window),
            "",
            y={"type": "category", "showgrid": False},
            hovermode="closest",
            height=120 + 24 * len(phases),
            **_wide(window),
        ),
        is_wide=True,
    )


def _bars_by_phase(bars: Sequence[Span]) -> list[Json]:
    """Return the bars of each entry of the legend; unknown phases come last."""
    found: dict[str, list[Span]] = {label: [] for label in _PHASES}
    for bar in sorted(bars, key=lambda bar: bar.phase):
        label = "IDLE / WAIT" if bar.phase in ("IDLE", "WAIT") else bar.phase
        found.setdefault(label, []).append(bar)
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": label,
            "y": [bar.row for bar in of_label],
            "base": [bar.start_s for bar in of_label],
            "x": [bar.end_s - bar.start_s for bar in of_label],
            "text": [bar.label for bar in of_label],
            "customdata": [_detail(bar) for bar in of_label],
            "hovertemplate": "%{customdata}<br>%{base:.4f} s, for %{x:.4f} s<extra>%{y}</extra>",
            "marker": {"color": _PHASES.get(label, palette.OTHER), "line": {"width": 0}},
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "constraintext": "inside",
        }
        for label, of_label in found.items()
        if of_label
    ]


def _detail(bar: Span) -> str:
    detail = ", ".join(f"{name} {value}" for name, value in bar.args.items())
    return f"{bar.name}: {detail}" if detail else bar.name
