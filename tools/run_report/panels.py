"""The panels of the report: one function for each figure, from the numbers of a run folder.

If a run did not do something, its panel is an `Absent` with a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from plotly.colors import sample_colorscale

from tools.run_report import palette
from tools.run_report.data import RunData
from tools.run_report.figure import (
    Absent,
    Json,
    Panel,
    make_bars,
    make_curve,
    make_layout,
    make_share_map,
)
from tools.run_report.rank_panels import build_rank_panels

DOTS = "lines+markers"
_TIMINGS = {  # timing_s/*: name, colour
    "gen": ("rollout", palette.SKY),
    "reward": ("rewards", palette.PURPLE),
    "old_log_prob": ("log-probs", palette.YELLOW),
    "ref": ("reference log-probs", palette.OLIVE),
    "values": ("values", palette.OTHER),
    "update_critic": ("update of the critic", palette.MINT),
    "update_actor": ("update", palette.GREEN),
    "update_weights": ("weight sync", palette.BLACK),
    "publish_drafter": ("publish drafter", palette.SALMON),
    "save_checkpoint": ("checkpoint", palette.BROWN),
    "testing": ("evaluation", palette.VIOLET),
}
_COMPARED = {  # title and name of the y axis, by metric
    "critic/rewards/mean": ("Mean reward in training", "reward"),
    "eval/accuracy": ("Held-out accuracy", "accuracy"),
    "timing_s/step": ("Step time", "seconds"),
    "rollout/spec_accept_length": ("Accept length", "tokens per verify pass"),
}
_NOT_STACKED = {"step", "wait"}  # ranks wait beside another rank's rollout
_DEPTHS = ("#8A4FA8", "#4B73B5", "#21918C", "#5EC962", "#B5A80B")  # readable on a dark page too
_STACKED = {"barmode": "stack", "bargap": 0.15}


def build_panels(run: RunData, steps: tuple[int, int] | None) -> list[Panel | Absent]:
    """Return all panels in the order of the page. `steps` is the window of the timeline; None: the last two."""
    return [
        *build_rank_panels(run, steps),
        _acceptance(run),
        _strategies(run),
        _bubble(run),
        _step_time(run),
        _memory(run),
        _over_steps(
            run,
            "drafter_loss",
            ("Drafter loss", "loss (nats)"),
            [("loss", "drafter/loss", palette.ORANGE, DOTS)],
            note="Mean over the drafter's updates in that step's idle time.",
            absent=_reason(run, "spot", "drafter/loss"),
        ),
        _accept_length(run),
        _over_steps(
            run,
            "rewards",
            ("Rewards", "reward"),
            [
                ("mean reward in training", "critic/rewards/mean", palette.BLUE, "lines"),
                ("held-out accuracy", "eval/accuracy", palette.VERMILLION, DOTS),
            ],
        ),
        _over_steps(
            run,
            "lengths",
            ("Response length", "tokens (log scale)"),
            [
                ("longest", "response_length/max", palette.PURPLE, "lines"),
                ("mean", "response_length/mean", palette.BLUE, "lines"),
                ("median", "response_length/median", palette.GREEN, "lines"),
            ],
            y={"type": "log", "dtick": "D2", "tickformat": ","},
        ),
    ]


def _reason(run: RunData, section: str, files: str) -> str:
    """Say that `section` was off, or else that the run did not write `files`."""
    name = "Speculation" if section == "speculation" else "Spot training"
    is_off = f"{name} was off ({section}.enabled=false)."
    return f"The run wrote no {files}." if run.is_on(section) else is_off


def _over_steps(
    run: RunData,
    key: str,
    labels: tuple[str, str],
    curves: Sequence[tuple[str, str, str, str]],
    *,
    note: str = "",
    absent: str = "",
    y: Json | None = None,
) -> Panel | Absent:
    """Return a panel over RL steps of those `curves` (name, metric, colour, mode) that the run wrote.

    `labels` are the title and the name of the y axis.
    """
    title, y_label = labels
    found = [(name, color, run.series(metric), mode) for name, metric, color, mode in curves]
    data = [make_curve(*curve) for curve in found if curve[2][0]]
    if not data:
        return Absent(title=title, sentence=absent or f"The run wrote no {curves[0][1]}.")
    layout = make_layout("RL step", y_label, y=y)
    return Panel(key=key, title=title, note=note, data=data, layout=layout)


def _acceptance(run: RunData) -> Panel | Absent:
    title, prefix = "Accepted tokens by depth", "rollout/spec_accepted_at/"
    depths = sorted(map(int, run.names_after(prefix)))
    if not depths:
        return Absent(title=title, sentence=_reason(run, "speculation", f"{prefix}*"))
    places = [(depth - 1) / max(depths[-1] - 1, 1) for depth in depths]
    colors = sample_colorscale(list(_DEPTHS), places)
    return Panel(
        key="acceptance",
        title=title,
        note="Share of verify passes that accepted at least so many drafted tokens.",
        data=[
            make_curve(f"≥ {depth}", color, run.series(f"{prefix}{depth}"))
            for depth, color in zip(depths, colors, strict=True)
        ],
        layout=make_layout("RL step", "share of verify passes", y={"range": [0, 1.02]}),
    )


def _strategies(run: RunData) -> Panel | Absent:
    title = "Strategy by batch size: share of passes"
    if not run.passes:
        return Absent(title=title, sentence=_reason(run, "speculation", "speculation.jsonl"))

    def cell_of(row: dict[str, Any]) -> tuple[int, str]:
        return (row["batch_size"] - 1).bit_length(), row["strategy"]  # 1, 2, 3-4, 5-8, ...

    ordered = sorted(run.passes, key=cell_of)
    cells = {cell: list(rows) for cell, rows in groupby(ordered, key=cell_of)}
    buckets = sorted({bucket for bucket, _ in cells})
    strategies = sorted({strategy for _, strategy in cells}, key=_strategy_order)
    grid = [[cells.get((bucket, strategy), []) for bucket in buckets] for strategy in strategies]
    counts = [[sum(row["passes"] for row in rows) for rows in of] for of in grid]
    totals = [sum(of_bucket) for of_bucket in zip(*counts, strict=True)]
    shares = [[n / total for n, total in zip(of, totals, strict=True)] for of in counts]
    heat_map = make_share_map(
        [_bucket_name(bucket) for bucket in buckets],
        strategies,
        shares,
        customdata=[[_cell_detail(rows) for rows in of] for of in grid],
        text=[[_percent(share) for share in of] for of in shares],
        texttemplate="%{text}",
        hovertemplate="%{y} at %{x} requests: %{z:.1%}<br>%{customdata}<extra></extra>",
        xgap=2,
        ygap=2,
    )
    is_category = {"type": "category"}
    labels = ("running requests on the rank", "strategy (steps_topk_tokens)")
    return Panel(
        key="strategies",
        title=title,
        note="Of the passes at that batch size, all steps and ranks; off is plain decoding.",
        data=[heat_map],
        layout=make_layout(*labels, x=is_category, y=is_category, hovermode="closest"),
    )


def _strategy_order(strategy: str) -> tuple[bool, list[int], str]:
    return strategy != "off", [int(number) for number in re.findall(r"\d+", strategy)], strategy


def _bucket_name(bucket: int) -> str:
    low, high = (1 << bucket >> 1) + 1, 1 << bucket
    return f"{high}" if bucket < 2 else f"{low}–{high}"


def _percent(share: float) -> str:
    if not share:
        return ""
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _cell_detail(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "never"
    num_passes = sum(row["passes"] for row in rows)
    requests = sum(row["passes"] * row["batch_size"] for row in rows)
    committed, seconds = (sum(row[name] for row in rows) for name in ("committed", "seconds"))
    speed = f", {committed / seconds:,.0f} tokens/s" if seconds > 0 else ""
    return f"{num_passes:,} passes, {committed / requests:.2f} tokens per pass and request{speed}"


def _bubble(run: RunData) -> Panel | Absent:
    title = "Idle time of ranks, and what it was used for"
    steps, idle = run.series("bubble/idle_s")
    if not steps:
        return Absent(title=title, sentence="The run wrote no bubble/idle_s.")
    used, stall = (
        dict(zip(*run.series(f"bubble/{name}"), strict=True)) for name in ("used_s", "stall_s")
    )
    unused = [
        None if whole is None else whole - (used.get(step) or 0.0)
        for step, whole in zip(steps, idle, strict=True)
    ]
    data = [make_bars("idle, unused", palette.GREY, (steps, unused))]
    note = "Rank-seconds between a rank's last response and the last of all ranks"
    if used:
        training, held_up = ((steps, [values.get(s) for s in steps]) for values in (used, stall))
        data = [
            make_bars("used: drafter training", palette.ORANGE, training),
            *data,
            make_bars("stall: held up", palette.VERMILLION, held_up),
        ]
    note += "; stall: held up by drafter work, on top." if used else ". Spot training was off."
    layout = make_layout("RL step", "rank-seconds per step", **_STACKED)
    return Panel(key="bubble", title=title, note=note, data=data, layout=layout)


def _step_time(run: RunData) -> Panel | Absent:
    title = "Step time by phase"
    written = set(run.names_after("timing_s/")) - _NOT_STACKED
    if not written:
        return Absent(title=title, sentence="The run wrote no timing_s/*.")
    known = [phase for phase in _TIMINGS if phase in written]
    data = [
        make_bars(*_TIMINGS.get(phase, (phase, palette.OTHER)), run.series(f"timing_s/{phase}"))
        for phase in [*known, *sorted(written - set(known))]
    ]
    return Panel(
        key="step_time",
        title=title,
        note="Each phase on its slowest rank; waiting for the slowest rollout is a part of that rollout.",
        data=[
            *data,
            make_curve("whole step", palette.BLACK, run.series("timing_s/step"), "markers"),
        ],
        layout=make_layout("RL step", "seconds", **_STACKED),
    )


def _memory(run: RunData) -> Panel | Absent:
    title = "Memory of the fullest rank against the ledger"
    kinds = {"peak": ("measured", palette.BLUE), "planned": ("memory ledger", palette.GREY)}
    bars = []
    for kind, (name, color) in kinds.items():
        phases = run.names_after(f"memory/{kind}_gb/")
        values = [run.series(f"memory/{kind}_gb/{phase}")[1] for phase in phases]
        highest = [max((v for v in of if v is not None), default=None) for of in values]
        bars.append(make_bars(name, color, (phases, highest)))
    if not bars[0]["x"]:
        return Absent(title=title, sentence="The run wrote no memory/peak_gb/*.")
    return Panel(
        key="memory",
        title=title,
        note="Highest peak of all steps; of a CPU, resident memory with the libraries of the process.",
        data=bars,
        layout=make_layout("phase", "GB", x={"type": "category"}, barmode="group"),
    )


def build_comparison(runs: Sequence[RunData]) -> list[Panel | Absent]:
    """Return the panels of several runs: a curve for each, by its name."""
    panels: list[Panel | Absent] = []
    for metric, (title, y_label) in _COMPARED.items():
        curves = [
            make_curve(
                run.name, palette.RANKS[number % len(palette.RANKS)], run.series(metric), DOTS
            )
            for number, run in enumerate(runs)
            if run.series(metric)[0]
        ]
        layout = make_layout("RL step", y_label)
        key = metric.replace("/", "_")
        panels.append(
            Panel(key=key, title=title, data=curves, layout=layout)
            if curves
            else Absent(title=title, sentence=f"No run wrote {metric}.")
        )
    return panels


def _accept_length(run: RunData) -> Panel | Absent:
    metric = "rollout/spec_accept_length"
    panel = _over_steps(
        run,
        "accept_length",
        ("Accept length", "tokens per verify pass"),
        [("in rollouts", metric, palette.BLUE, DOTS)],
        note="Tokens out for each request and verify pass, the bonus token included.",
        absent=f"Nothing was drafted: no {metric}.",
    )
    if isinstance(panel, Absent):
        return panel
    for name, color, of in (
        ("drafter in training", palette.ORANGE, "drafter/accept_length"),
        ("drafter on held-out data", palette.GREEN, "drafter/holdout_accept_length/published"),
    ):
        if run.series(of)[0]:
            panel.data.append(make_curve(name, color, run.series(of), dash="dash"))
    alarms = {step for step, value in zip(*run.series("drafter/alarm"), strict=True) if value}
    points = [point for point in zip(*run.series(metric), strict=True) if point[0] in alarms]
    if points:
        x, y = zip(*points, strict=True)
        panel.data.append(make_curve("drafter alarm", palette.VERMILLION, (x, y), "markers"))
    return panel
