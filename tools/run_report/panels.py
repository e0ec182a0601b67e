"""The panels of the report as values: numbers and colours that page.py and picture.py draw.

tools/report.py calls `build_panels`. Every number comes from the run folder. If a run did not do something, its panel is an
`Absent` with a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.run_report.data import RunData
from tools.run_report.lanes import (
    Segment,
    Window,
    choose_window,
    moments_in,
    outside_evaluations,
    running_requests,
    segments_of,
)
from tools.run_report.palette import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RANK_COLORS,
    VERMILLION,
    depth_color,
    timing_color,
)

Value = float | int | None
_MIN_LABEL = 0.04  # of the window: narrower bars have no text


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named series of numbers."""

    name: str
    color: str
    x: Sequence[Value]
    y: Sequence[Value]
    mode: str = "lines"  # lines | dots (with lines) | marks (alone) | steps | dashed


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Curves over one axis."""

    series: tuple[Series, ...]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    is_log: bool = False

    @property
    def log_ticks(self) -> list[int]:
        """Return 1, 2, 5, 10, ... within the range of the values."""
        values = [y for series in self.series for y in series.y if y]
        steps = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
        return [step for step in steps if min(values) <= step <= max(values)] if values else []


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBars:
    """A bar for each x. `marks` are drawn over the stacks."""

    series: tuple[Series, ...]
    marks: Series | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Shares in [0, 1]; None for a cell without a measurement."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]  # bottom to top
    shares: tuple[tuple[float | None, ...], ...]  # [row][column]
    details: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """A timeline."""

    segments: tuple[Segment, ...]
    moments: tuple[Segment, ...]
    window: Window

    @property
    def names(self) -> list[str]:
        """Return the lanes, top to bottom."""
        return list(dict.fromkeys(segment.lane for segment in self.segments))

    @property
    def width_s(self) -> float:
        """Return the width of the window."""
        return self.window.end_s - self.window.start_s

    def label_of(self, segment: Segment) -> str:
        """Return the text inside the bar: its label if there is room for it."""
        is_wide = segment.end_s - segment.start_s > _MIN_LABEL * self.width_s
        return segment.label if is_wide else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure with its text."""

    key: str
    title: str
    note: str  # how to read it
    x_label: str
    y_label: str
    content: Lines | StackedBars | HeatMap | Lanes
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """The reason why a figure is missing."""

    title: str
    sentence: str


def percent(share: float | None) -> str:
    """Return the text of a heat map cell; empty for None or 0."""
    if not share:
        return ""
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def build_panels(run: RunData, steps: tuple[int, int] | None) -> list[Panel | Absent]:
    """Return all panels in the order of the page. `steps` is the window of the timeline; None: the last two."""
    return [
        *_timeline(run, steps),
        _acceptance(run),
        _strategies(run),
        _bubble(run),
        _step_time(run),
        *_drafter(run),
        _rewards(run),
        _lengths(run),
    ]


def _timeline(run: RunData, steps: tuple[int, int] | None) -> list[Panel | Absent]:
    if run.spans is None:
        return [Absent(title="Timeline", sentence="The run kept no trace (logging.trace=false).")]
    spans = outside_evaluations(run.spans)
    window = choose_window(spans, steps)
    time_label = f"seconds since the start of step {min(window.step_starts)}"
    panels: list[Panel | Absent] = [
        Panel(
            key="timeline",
            title=f"What every rank did in {window.title}",
            note="Innermost span at any time; point at a bar for batch size, strategy and reason. A step ends when the engines"
            " hold its policy, so an evaluation is drawn at the start of the next one.",
            x_label=time_label,
            y_label="",
            content=Lanes(
                segments=tuple(segments_of(spans, window)),
                moments=tuple(moments_in(run.moments, window)),
                window=window,
            ),
            is_wide=True,
        )
    ]
    curves = running_requests(spans, window)
    if curves:
        series = tuple(
            Series(
                name=f"rank {rank}",
                color=RANK_COLORS[rank % len(RANK_COLORS)],
                x=times,
                y=sizes,
                mode="steps",
            )
            for rank, (times, sizes) in curves.items()
        )
        panels.append(
            Panel(
                key="running",
                title="The long tail: requests still decoding",
                note="Size of each rank's batch, on the time axis of the timeline.",
                x_label=time_label,
                y_label="requests",
                content=Lines(series=series, x_range=(0.0, window.end_s - window.start_s)),
                is_wide=True,
            )
        )
    return panels


def _acceptance(run: RunData) -> Panel | Absent:
    title = "Accepted tokens by depth"
    depths = _depths(run, "rollout/spec_accepted_at/")
    if not depths:
        sentence = (
            "The run wrote no rollout/spec_accepted_at/*."
            if run.is_on("speculation")
            else "Speculation was off (speculation.enabled=false)."
        )
        return Absent(title=title, sentence=sentence)
    series = []
    for depth in depths:
        x, y = run.series(f"rollout/spec_accepted_at/{depth}")
        color = depth_color(depth, max(depths))
        series.append(Series(name=f"≥ {depth}", color=color, x=x, y=y))
    return Panel(
        key="acceptance",
        title=title,
        note="Share of verify passes that accepted at least so many drafted tokens.",
        x_label="RL step",
        y_label="share of verify passes",
        content=Lines(series=tuple(series), y_range=(0.0, 1.02)),
    )


def _strategies(run: RunData) -> Panel | Absent:
    title = "Strategy by batch size: share of passes"
    if not run.passes:
        sentence = (
            "The run wrote no speculation.jsonl."
            if run.is_on("speculation")
            else "Speculation was off (speculation.enabled=false)."
        )
        return Absent(title=title, sentence=sentence)
    cells: dict[tuple[str, int], list[dict[str, object]]] = {}
    for row in run.passes:
        bucket = (_int(row["batch_size"]) - 1).bit_length()  # 1, 2, 3-4, 5-8, ...
        cells.setdefault((str(row["strategy"]), bucket), []).append(row)
    strategies = sorted({strategy for strategy, _ in cells}, key=_strategy_order)
    buckets = sorted({bucket for _, bucket in cells})
    totals = {
        bucket: sum(_int(row["passes"]) for (_, b), rows in cells.items() if b == bucket for row in rows)
        for bucket in buckets
    }  # fmt: skip
    shares, details = [], []
    for strategy in strategies:
        of_strategy = [cells.get((strategy, bucket), []) for bucket in buckets]
        counts = [sum(_int(row["passes"]) for row in rows) for rows in of_strategy]
        shares.append(tuple(n / totals[b] for n, b in zip(counts, buckets, strict=True)))
        details.append(tuple(_cell_detail(rows) for rows in of_strategy))
    return Panel(
        key="strategies",
        title=title,
        note="Of the passes at that batch size, all steps and ranks; off is plain decoding.",
        x_label="running requests on the rank",
        y_label="strategy (steps_topk_tokens)",
        content=HeatMap(
            columns=tuple(_bucket_name(bucket) for bucket in buckets),
            rows=tuple(strategies),
            shares=tuple(shares),
            details=tuple(details),
        ),
    )


def _cell_detail(rows: Sequence[dict[str, object]]) -> str:
    if not rows:
        return "never"
    passes = sum(_int(row["passes"]) for row in rows)
    requests = sum(_int(row["passes"]) * _int(row["batch_size"]) for row in rows)
    committed = sum(_int(row["committed"]) for row in rows)
    seconds = sum(float(str(row["seconds"])) for row in rows)
    speed = f", {committed / seconds:,.0f} tokens/s" if seconds > 0 else ""
    return f"{passes:,} passes, {committed / requests:.2f} tokens per pass and request{speed}"


def _bubble(run: RunData) -> Panel | Absent:
    title = "Idle time of ranks, and what it was used for"
    steps, idle = run.series("bubble/idle_s")
    if not steps:
        return Absent(title=title, sentence="The run wrote no bubble/idle_s.")
    used = dict(zip(*run.series("bubble/used_s"), strict=True))
    stall = dict(zip(*run.series("bubble/stall_s"), strict=True))
    unused = [
        None if whole is None else whole - (used.get(step) or 0.0)
        for step, whole in zip(steps, idle, strict=True)
    ]
    series = [
        Series(name="used: drafter training", color=ORANGE, x=steps, y=[used.get(s) for s in steps]),
        Series(name="idle, unused", color=GREY, x=steps, y=unused),
        Series(name="stall: held up", color=VERMILLION, x=steps, y=[stall.get(s) for s in steps]),
    ]  # fmt: skip
    note = "Rank-seconds between a rank's last response and the last of all ranks; stall: held up by drafter work, on top."
    if not used:
        series = series[1:2]
        note = "Rank-seconds between a rank's last response and the last of all ranks. Spot training was off."
    return Panel(
        key="bubble",
        title=title,
        note=note,
        x_label="RL step",
        y_label="rank-seconds per step",
        content=StackedBars(series=tuple(series)),
    )


def _step_time(run: RunData) -> Panel | Absent:
    title = "Step time by phase"
    names = sorted(
        {name for row in run.rows for name in row if name.startswith("timing_s/")}
        - {"timing_s/step", *_OVERLAPPING},
        key=_timing_order,
    )
    if not names:
        return Absent(title=title, sentence="The run wrote no timing_s/*.")
    series = []
    for name in names:
        x, y = run.series(name)
        phase = name.removeprefix("timing_s/")
        label = _TIMING_LABELS.get(phase, phase)
        series.append(Series(name=label, color=timing_color(phase), x=x, y=y))
    x, y = run.series("timing_s/step")
    return Panel(
        key="step_time",
        title=title,
        note="Each phase on its slowest rank; waiting for the slowest rollout is a part of that rollout.",
        x_label="RL step",
        y_label="seconds",
        content=StackedBars(
            series=tuple(series),
            marks=Series(name="whole step", color=BLACK, x=x, y=y, mode="marks"),
        ),
    )


def _drafter(run: RunData) -> list[Panel | Absent]:
    panels: list[Panel | Absent] = []
    x, y = run.series("drafter/loss")
    if x:
        panels.append(
            Panel(
                key="drafter_loss",
                title="Drafter loss",
                note="Mean over the drafter's updates in that step's idle time.",
                x_label="RL step",
                y_label="loss (nats)",
                content=Lines(series=(Series(name="loss", color=ORANGE, x=x, y=y, mode="dots"),)),
            )
        )
    else:
        sentence = (
            "The run wrote no drafter/loss."
            if run.is_on("spot")
            else "Spot training was off (spot.enabled=false)."
        )
        panels.append(Absent(title="Drafter loss", sentence=sentence))
    panels.append(_accept_length(run))
    return panels


def _accept_length(run: RunData) -> Panel | Absent:
    title = "Accept length"
    series = []
    for label, name, color, mode in (
        ("in rollouts", "rollout/spec_accept_length", BLUE, "dots"),
        ("drafter in training", "drafter/accept_length", ORANGE, "dashed"),
        ("drafter on held-out data", "drafter/holdout_accept_length/published", GREEN, "dashed"),
    ):
        x, y = run.series(name)
        if x:
            series.append(Series(name=label, color=color, x=x, y=y, mode=mode))
    if not series:
        return Absent(title=title, sentence="Nothing was drafted: no rollout/spec_accept_length.")
    alarms = {step for step, value in zip(*run.series("drafter/alarm"), strict=True) if value}
    points = [p for p in zip(series[0].x, series[0].y, strict=True) if p[0] in alarms]
    if points:
        alarm_x, alarm_y = zip(*points, strict=True)
        series.append(
            Series(name="drafter alarm", color=VERMILLION, x=alarm_x, y=alarm_y, mode="marks")
        )
    return Panel(
        key="accept_length",
        title=title,
        note="Tokens out for each request and verify pass, the bonus token included.",
        x_label="RL step",
        y_label="tokens per verify pass",
        content=Lines(series=tuple(series)),
    )


def _rewards(run: RunData) -> Panel | Absent:
    series = []
    for label, name, color, mode in (
        ("mean reward in training", "critic/rewards/mean", BLUE, "lines"),
        ("held-out accuracy", "eval/accuracy", VERMILLION, "dots"),
    ):
        x, y = run.series(name)
        if x:
            series.append(Series(name=label, color=color, x=x, y=y, mode=mode))
    return _lines_or_absent("rewards", "Rewards", series, "reward", "The run wrote no rewards.")


def _lengths(run: RunData) -> Panel | Absent:
    series = []
    for label, name, color in (
        ("longest", "response_length/max", PURPLE),
        ("mean", "response_length/mean", BLUE),
        ("median", "response_length/median", GREEN),
    ):
        x, y = run.series(name)
        if x:
            series.append(Series(name=label, color=color, x=x, y=y))
    title = "Response length"
    absent = "The run wrote no response_length/*."
    return _lines_or_absent("lengths", title, series, "tokens (log scale)", absent, is_log=True)


def _lines_or_absent(
    key: str,
    title: str,
    series: Iterable[Series],
    y_label: str,
    absent: str,
    *,
    is_log: bool = False,
) -> Panel | Absent:
    series = tuple(series)
    if not series:
        return Absent(title=title, sentence=absent)
    return Panel(
        key=key,
        title=title,
        note="",
        x_label="RL step",
        y_label=y_label,
        content=Lines(series=series, is_log=is_log),
    )


_TIMING_LABELS = {
    "gen": "rollout",
    "reward": "rewards",
    "old_log_prob": "log-probs",
    "ref": "reference log-probs",
    "update_actor": "update",
    "update_weights": "weight sync",
    "save_checkpoint": "checkpoint",
    "testing": "evaluation",
}
_OVERLAPPING = ("timing_s/wait",)  # runs beside another rank's rollout


def _timing_order(name: str) -> tuple[int, str]:
    names = list(_TIMING_LABELS)
    phase = name.removeprefix("timing_s/")
    return (names.index(phase) if phase in names else len(names), phase)


def _depths(run: RunData, prefix: str) -> list[int]:
    names = {name for row in run.rows for name in row if name.startswith(prefix)}
    return sorted(int(name.removeprefix(prefix)) for name in names)


def _strategy_order(strategy: str) -> tuple[bool, list[int], str]:
    return strategy != "off", [int(number) for number in re.findall(r"\d+", strategy)], strategy


def _bucket_name(bucket: int) -> str:
    low, high = (1 << bucket >> 1) + 1, 1 << bucket
    return f"{high}" if bucket < 2 else f"{low}–{high}"


def _int(value: object) -> int:
    return int(str(value))
