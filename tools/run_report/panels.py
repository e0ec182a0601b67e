"""The panels of the report: one function for each figure, from the numbers of a run folder.

If a run did not do something, its panel has a sentence and no data.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import cycle, groupby
from typing import Any

from plotly.colors import sample_colorscale

from tools.run_report import palette
from tools.run_report.data import RunData
from tools.run_report.figure import (
    Json,
    Panel,
    make_bars,
    make_curve,
    make_layout,
    make_share_map,
)
from tools.run_report.rank_panels import build_rank_panels

# Settings of a curve, and a curve over RL steps: name, metric, colour, settings.
LINE: dict[str, str] = {}
DOTS, DASHED = {"mode": "lines+markers"}, {"dash": "dash"}
Curve = tuple[str, str, str, dict[str, str]]

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
_TIMING_ORDER = {phase: place for place, phase in enumerate(_TIMINGS)}
_HOLDOUT = "drafter/holdout_accept_length/published"
_NOT_STACKED = {"step", "wait"}  # ranks wait beside another rank's rollout
_DEPTHS = ("#8A4FA8", "#4B73B5", "#21918C", "#5EC962", "#B5A80B")  # readable on a dark page too
_STACKED = {"barmode": "stack", "bargap": 0.15}


_OVER_STEPS: dict[str, tuple[str, str, str, list[Curve]]] = {  # by key: title, y axis, note, curves
    "accept_length": (
        "Accept length",
        "tokens per verify pass",
        "Tokens out for each request and verify pass, the bonus token included.",
        [
            ("in rollouts", "rollout/spec_accept_length", palette.BLUE, DOTS),
            ("drafter in training", "drafter/accept_length", palette.ORANGE, DASHED),
            ("drafter on held-out data", _HOLDOUT, palette.GREEN, DASHED),
        ],
    ),
    "rewards": (
        "Rewards",
        "reward",
        "",
        [
            ("mean reward in training", "critic/rewards/mean", palette.BLUE, LINE),
            ("held-out accuracy", "eval/accuracy", palette.VERMILLION, DOTS),
        ],
    ),
    "lengths": (
        "Response length",
        "tokens (log scale)",
        "",
        [
            ("longest", "response_length/max", palette.PURPLE, LINE),
            ("mean", "response_length/mean", palette.BLUE, LINE),
            ("median", "response_length/median", palette.GREEN, LINE),
        ],
    ),
}
_AXES = {"lengths": {"type": "log", "dtick": "D2", "tickformat": ","}}


def build_panels(run: RunData, steps: tuple[int, int] | None) -> list[Panel]:
    """Return all panels in the order of the page.

    `steps` is the window of the timeline; None: the last two.
    """
    return [
        *build_rank_panels(run, steps),
        _acceptance(run),
        _strategies(run),
        _bubble(run),
        _step_time(run),
        _memory(run),
        *(
            _over_steps(run, key, labels, curves, note=note, y=_AXES.get(key))
            for key, (*labels, note, curves) in _OVER_STEPS.items()
        ),
    ]


def build_comparison(runs: Sequence[RunData]) -> list[Panel]:
    """Return the panels of several runs: a curve for each, by its name."""
    return [
        Panel(
            key=metric.replace("/", "_"),
            title=title,
            data=[
                make_curve(run.name, color, run.series(metric), **DOTS)
                for run, color in zip(runs, cycle(palette.RANKS), strict=False)
                if run.series(metric)[0]
            ],
            layout=make_layout("RL step", y_label),
            absent=f"No run wrote {metric}.",
        )
        for metric, (title, y_label) in _COMPARED.items()
    ]


def _reason(run: RunData, files: str) -> str:
    """Say that speculation was off, or else that the run did not write `files`."""
    is_off = "Speculation was off (speculation.enabled=false)."
    return f"The run wrote no {files}." if run.is_on("speculation") else is_off


def _over_steps(
    run: RunData,
    key: str,
    labels: Sequence[str],
    curves: Sequence[Curve],
    *,
    note: str = "",
    absent: str = "",
    y: Json | None = None,
) -> Panel:
    """Return a panel over RL steps of those `curves` that the run wrote.

    `labels` are its title and the name of the y axis.
    """
    title, y_label = labels
    return Panel(
        key=key,
        title=title,
        note=note,
        data=[
            make_curve(name, color, run.series(metric), **settings)
            for name, metric, color, settings in curves
            if run.series(metric)[0]
        ],
        layout=make_layout("RL step", y_label, y=y),
        absent=absent or f"The run wrote no {curves[0][1]}.",
    )


def _acceptance(run: RunData) -> Panel:
    prefix = "rollout/spec_accepted_at/"
    depths = sorted(map(int, run.names_after(prefix)))
    places = [(depth - 1) / max(depths[-1] - 1, 1) for depth in depths]
    colors = sample_colorscale(list(_DEPTHS), places)
    return _over_steps(
        run,
        "acceptance",
        ("Accepted tokens by depth", "share of verify passes"),
        [
            (f"≥ {depth}", f"{prefix}{depth}", str(color), LINE)
            for depth, color in zip(depths, colors, strict=True)
        ],
        note="Share of verify passes that accepted at least so many drafted tokens.",
        absent=_reason(run, f"{prefix}*"),
        y={"range": [0, 1.02]},
    )


def _strategies(run: RunData) -> Panel:
    title = "Strategy by batch size: share of passes"
    if not run.passes:
        return Panel(title=title, absent=_reason(run, "speculation.jsonl"))

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


def _bubble(run: RunData) -> Panel:
    used, stall = run.series("bubble/used_s"), run.series("bubble/stall_s")
    rows = [row for row in run.rows if row.get("bubble/idle_s") is not None]
    unused = [(row["bubble/idle_s"] or 0.0) - (row.get("bubble/used_s") or 0.0) for row in rows]
    bars = [
        ("used", palette.ORANGE, used),
        ("idle, unused", palette.GREY, ([row["step"] for row in rows], unused)),
        ("stall: held up", palette.VERMILLION, stall),
    ]
    note = "Rank-seconds between a rank's last response and the last of all ranks"
    note += "; stall: held up by drafter work, on top." if used[0] else ". Spot training was off."
    return Panel(
        key="bubble",
        title="Idle time of ranks, and what it was used for",
        note=note,
        data=[make_bars(*bar) for bar in bars if bar[2][0]],
        layout=make_layout("RL step", "rank-seconds per step", **_STACKED),
        absent="The run wrote no bubble/idle_s.",
    )


def _step_time(run: RunData) -> Panel:
    written = set(run.names_after("timing_s/")) - _NOT_STACKED
    phases = sorted(written, key=lambda phase: (_TIMING_ORDER.get(phase, len(_TIMINGS)), phase))
    data = [
        make_bars(*_TIMINGS.get(phase, (phase, palette.OTHER)), run.series(f"timing_s/{phase}"))
        for phase in phases
    ]
    if data:
        whole = run.series("timing_s/step")
        data.append(make_curve("whole step", palette.BLACK, whole, "markers"))
    return Panel(
        key="step_time",
        title="Step time by phase",
        note="Each phase on its slowest rank; waiting for the slowest rollout is a part of that rollout.",
        data=data,
        layout=make_layout("RL step", "seconds", **_STACKED),
        absent="The run wrote no timing_s/*.",
    )


def _memory(run: RunData) -> Panel:
    kinds = {"peak": ("measured", palette.BLUE), "planned": ("memory ledger", palette.GREY)}
    bars = []
    for kind, (name, color) in kinds.items():
        phases = run.names_after(f"memory/{kind}_gb/")
        values = [run.series(f"memory/{kind}_gb/{phase}")[1] for phase in phases]
        highest = [max((v for v in of if v is not None), default=None) for of in values]
        bars.append(make_bars(name, color, (phases, highest)))
    return Panel(
        key="memory",
        title="Memory of the fullest rank against the ledger",
        note="Highest peak of all steps; of a CPU, resident memory with the libraries of the process.",
        data=bars if bars[0]["x"] else [],
        layout=make_layout("phase", "GB", x={"type": "category"}, barmode="group"),
        absent="The run wrote no memory/peak_gb/*.",
    )
