"""The panels of the report: numbers of a run folder, with titles and colours.

tools/report.py calls `build_panels`. If a run did not do something, its panel is an `Absent` with a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tools.run_report.data import RunData
from tools.run_report.figures import (
    Absent,
    HeatMap,
    Lanes,
    Lines,
    Panel,
    Series,
    StackedBars,
)
from tools.run_report.lanes import (
    choose_window,
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


def build_panels(run: RunData, steps: tuple[int, int] | None) -> list[Panel | Absent]:
    """Return all panels in the order of the page. `steps` is the window of the timeline; None: the last two."""
    return [
        *_timeline(run, steps),
        _acceptance(run),
        _strategies(run),
        _bubble(run),
        _step_time(run),
        _drafter_loss(run),
        _accept_length(run),
        _curves(
            run,
            "rewards",
            "Rewards",
            "reward",
            ("mean reward in training", "critic/rewards/mean", BLUE, "lines"),
            ("held-out accuracy", "eval/accuracy", VERMILLION, "dots"),
        ),
        _curves(
            run,
            "lengths",
            "Response length",
            "tokens (log scale)",
            ("longest", "response_length/max", PURPLE, "lines"),
            ("mean", "response_length/mean", BLUE, "lines"),
            ("median", "response_length/median", GREEN, "lines"),
            is_log=True,
        ),
    ]


def _curves(
    run: RunData,
    key: str,
    title: str,
    y_label: str,
    *curves: tuple[str, str, str, str],
    note: str = "",
    absent: str = "",
    is_log: bool = False,
) -> Panel | Absent:
    """Return a panel over RL steps of those `curves` (name, metric, colour, mode) that the run wrote."""
    series = []
    for name, metric, color, mode in curves:
        x, y = run.series(metric)
        if x:
            series.append(Series(name=name, color=color, x=x, y=y, mode=mode))
    if not series:
        return Absent(title=title, sentence=absent or f"The run wrote no {curves[0][1]}.")
    content = Lines(series=tuple(series), is_log=is_log)
    return Panel(
        key=key, title=title, note=note, x_label="RL step", y_label=y_label, content=content
    )


def _absent(run: RunData, title: str, section: str, files: str) -> Absent:
    """Say that `section` was off, or else that the run did not write `files`."""
    name = "Speculation" if section == "speculation" else "Spot training"
    is_off = f"{name} was off ({section}.enabled=false)."
    return Absent(
        title=title, sentence=f"The run wrote no {files}." if run.is_on(section) else is_off
    )


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
                window=window,
            ),
            is_wide=True,
        )
    ]
    series = tuple(
        Series(
            name=f"rank {rank}",
            color=RANK_COLORS[rank % len(RANK_COLORS)],
            x=times,
            y=sizes,
            mode="steps",
        )
        for rank, (times, sizes) in running_requests(spans, window).items()
    )
    if series:
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
    title, prefix = "Accepted tokens by depth", "rollout/spec_accepted_at/"
    names = {name for row in run.rows for name in row if name.startswith(prefix)}
    depths = sorted(int(name.removeprefix(prefix)) for name in names)
    if not depths:
        return _absent(run, title, "speculation", f"{prefix}*")
    series = []
    for depth in depths:
        x, y = run.series(f"{prefix}{depth}")
        series.append(Series(name=f"≥ {depth}", color=depth_color(depth, max(depths)), x=x, y=y))
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
        return _absent(run, title, "speculation", "speculation.jsonl")
    cells: dict[tuple[str, int], list[dict[str, object]]] = {}
    totals: dict[int, int] = {}
    for row in run.passes:
        bucket = (_int(row["batch_size"]) - 1).bit_length()  # 1, 2, 3-4, 5-8, ...
        cells.setdefault((str(row["strategy"]), bucket), []).append(row)
        totals[bucket] = totals.get(bucket, 0) + _int(row["passes"])
    strategies = sorted({strategy for strategy, _ in cells}, key=_strategy_order)
    buckets = sorted(totals)
    by_strategy = [[cells.get((s, bucket), []) for bucket in buckets] for s in strategies]
    return Panel(
        key="strategies",
        title=title,
        note="Of the passes at that batch size, all steps and ranks; off is plain decoding.",
        x_label="running requests on the rank",
        y_label="strategy (steps_topk_tokens)",
        content=HeatMap(
            columns=tuple(_bucket_name(bucket) for bucket in buckets),
            rows=tuple(strategies),
            shares=tuple(
                tuple(_num_passes(rows) / totals[b] for rows, b in zip(of, buckets, strict=True))
                for of in by_strategy
            ),
            details=tuple(tuple(map(_cell_detail, of)) for of in by_strategy),
        ),
    )


def _strategy_order(strategy: str) -> tuple[bool, list[int], str]:
    return strategy != "off", [int(number) for number in re.findall(r"\d+", strategy)], strategy


def _bucket_name(bucket: int) -> str:
    low, high = (1 << bucket >> 1) + 1, 1 << bucket
    return f"{high}" if bucket < 2 else f"{low}–{high}"


def _cell_detail(rows: Sequence[dict[str, object]]) -> str:
    if not rows:
        return "never"
    requests = sum(_int(row["passes"]) * _int(row["batch_size"]) for row in rows)
    committed = sum(_int(row["committed"]) for row in rows)
    seconds = sum(float(str(row["seconds"])) for row in rows)
    speed = f", {committed / seconds:,.0f} tokens/s" if seconds > 0 else ""
    return f"{_num_passes(rows):,} passes, {committed / requests:.2f} tokens per pass and request{speed}"


def _num_passes(rows: Sequence[dict[str, object]]) -> int:
    return sum(_int(row["passes"]) for row in rows)


def _int(value: object) -> int:
    return int(str(value))


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
    series = [Series(name="idle, unused", color=GREY, x=steps, y=unused)]
    note = "Rank-seconds between a rank's last response and the last of all ranks"
    if used:
        training, held_up = ([values.get(s) for s in steps] for values in (used, stall))
        series = [
            Series(name="used: drafter training", color=ORANGE, x=steps, y=training),
            *series,
            Series(name="stall: held up", color=VERMILLION, x=steps, y=held_up),
        ]
    note += "; stall: held up by drafter work, on top." if used else ". Spot training was off."
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
    written = {name for row in run.rows for name in row if name.startswith("timing_s/")}
    phases = {name.removeprefix("timing_s/") for name in written} - _NOT_STACKED
    if not phases:
        return Absent(title=title, sentence="The run wrote no timing_s/*.")
    known = [phase for phase in _TIMING_LABELS if phase in phases]
    series = []
    for phase in [*known, *sorted(phases - set(known))]:
        x, y = run.series(f"timing_s/{phase}")
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


_TIMING_LABELS = {
    "gen": "rollout",
    "reward": "rewards",
    "old_log_prob": "log-probs",
    "ref": "reference log-probs",
    "update_actor": "update",
    "update_weights": "weight sync",
    "publish_drafter": "publish drafter",
    "save_checkpoint": "checkpoint",
    "testing": "evaluation",
}
_NOT_STACKED = {"step", "wait"}  # ranks wait beside another rank's rollout


def _drafter_loss(run: RunData) -> Panel | Absent:
    title = "Drafter loss"
    return _curves(
        run,
        "drafter_loss",
        title,
        "loss (nats)",
        ("loss", "drafter/loss", ORANGE, "dots"),
        note="Mean over the drafter's updates in that step's idle time.",
        absent=_absent(run, title, "spot", "drafter/loss").sentence,
    )


def _accept_length(run: RunData) -> Panel | Absent:
    panel = _curves(
        run,
        "accept_length",
        "Accept length",
        "tokens per verify pass",
        ("in rollouts", "rollout/spec_accept_length", BLUE, "dots"),
        ("drafter in training", "drafter/accept_length", ORANGE, "dashed"),
        ("drafter on held-out data", "drafter/holdout_accept_length/published", GREEN, "dashed"),
        note="Tokens out for each request and verify pass, the bonus token included.",
        absent="Nothing was drafted: no rollout/spec_accept_length.",
    )
    alarms = {step for step, value in zip(*run.series("drafter/alarm"), strict=True) if value}
    if isinstance(panel, Absent) or not alarms:
        return panel
    assert isinstance(panel.content, Lines)
    first, *_ = series = panel.content.series
    points = [point for point in zip(first.x, first.y, strict=True) if point[0] in alarms]
    marks = Series(
        name="drafter alarm",
        color=VERMILLION,
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="marks",
    )
    return replace(panel, content=Lines(series=(*series, marks)))
