"""The panels of the report below its timeline: metrics over RL steps, from one table, and the
strategies that were chosen.

If a run did not do something, its panel has a sentence and no data.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from tools.run_report import palette
from tools.run_report.data import RunData
from tools.run_report.figure import Panel, make_bars, make_curve, make_layout
from tools.run_report.rank_panel import build_rank_panel


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSteps:
    """A panel of metrics over RL steps."""

    key: str
    title: str
    y_label: str
    # By its entry of the legend. * in both stands for the rest of a name: one curve for each.
    metrics: dict[str, str]
    note: str = ""
    is_stacked: bool = False
    is_log: bool = False


_OVER_STEPS = (
    OverSteps(
        key="step_time",
        title="Step time by phase",
        y_label="seconds",
        metrics={"*": "timing_s/*"},
        note="Each phase on its slowest rank; waiting for the slowest rollout is a part of that rollout (gen).",
        is_stacked=True,
    ),
    OverSteps(
        key="bubble",
        title="Idle time of ranks, and what it was used for",
        y_label="rank-seconds per step",
        metrics={
            "idle": "bubble/idle_s",
            "used for drafter training": "bubble/used_s",
            "stall": "bubble/stall_s",
        },
        note="Rank-seconds between a rank's last response and the last of all ranks; stall: held up by drafter work.",
    ),
    OverSteps(
        key="acceptance",
        title="Accepted tokens by depth",
        y_label="share of verify passes",
        metrics={"≥ *": "rollout/spec_accepted_at/*"},
        note="Share of verify passes that accepted at least so many drafted tokens.",
    ),
    OverSteps(
        key="accept_length",
        title="Accept length",
        y_label="tokens per verify pass",
        metrics={
            "in rollouts": "rollout/spec_accept_length",
            "drafter in training": "drafter/accept_length",
            "drafter on held-out data": "drafter/holdout_accept_length/published",
        },
        note="Tokens out for each request and verify pass, the bonus token included.",
    ),
    OverSteps(
        key="rewards",
        title="Rewards",
        y_label="reward",
        metrics={
            "mean reward in training": "critic/rewards/mean",
            "held-out accuracy": "eval/accuracy",
        },
    ),
    OverSteps(
        key="lengths",
        title="Response length",
        y_label="tokens (log scale)",
        metrics={
            "longest": "response_length/max",
            "mean": "response_length/mean",
            "median": "response_length/median",
        },
        is_log=True,
    ),
)
_NOT_STACKED = ("timing_s/step", "timing_s/wait")  # ranks wait beside another rank's rollout
_COMPARED = {  # title and name of the y axis, by metric
    "critic/rewards/mean": ("Mean reward in training", "reward"),
    "eval/accuracy": ("Held-out accuracy", "accuracy"),
    "timing_s/step": ("Step time", "seconds"),
    "rollout/spec_accept_length": ("Accept length", "tokens per verify pass"),
}


def build_panels(run: RunData, steps: tuple[int, int] | None) -> list[Panel]:
    """Return all panels in the order of the page.

    `steps` is the window of the timeline; None: the last two.
    """
    step_time, *others = (_over_steps(run, panel) for panel in _OVER_STEPS)
    return [build_rank_panel(run, steps), step_time, _strategies(run), *others]


def build_comparison(runs: Sequence[RunData]) -> list[Panel]:
    """Return the panels of several runs: a curve for each, by its name."""
    return [
        Panel(
            key=metric.replace("/", "_"),
            title=title,
            data=[
                make_curve(run.name, color, run.series(metric))
                for run, color in zip(runs, cycle(palette.CURVES), strict=False)
                if run.series(metric)[0]
            ],
            layout=make_layout("RL step", y_label),
            absent=f"No run wrote {metric}.",
        )
        for metric, (title, y_label) in _COMPARED.items()
    ]


def _over_steps(run: RunData, panel: OverSteps) -> Panel:
    """Return the panel with those of its metrics that the run wrote."""
    written = {}
    for label, metric in panel.metrics.items():
        prefix, star, _ = metric.partition("*")
        names = run.names_after(prefix) if star else [""] if run.series(metric)[0] else []
        written |= {label.replace("*", name): prefix + name for name in names}
    make = make_bars if panel.is_stacked else make_curve
    log_axis = {"type": "log", "dtick": "D2", "tickformat": ","}
    return Panel(
        key=panel.key,
        title=panel.title,
        note=panel.note,
        data=[
            make(label, color, run.series(metric))
            for (label, metric), color in zip(written.items(), cycle(palette.CURVES), strict=False)
            if metric not in _NOT_STACKED
        ],
        layout=make_layout("RL step", panel.y_label, y=log_axis if panel.is_log else {}),
        absent=_absent(run, next(iter(panel.metrics.values()))),
    )


def _strategies(run: RunData) -> Panel:
    """Return what share of the passes at a batch size (1, 2, 3-4, 5-8, ...) had each strategy."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for strategy, batch_size, num_passes in run.passes:
        counts[strategy][(batch_size - 1).bit_length()] += num_passes
    totals = sum(counts.values(), Counter[int]())
    names = [_name_of(bucket) for bucket in sorted(totals)]
    bars = []
    ordered = sorted(counts, key=lambda strategy: (strategy != "off", strategy))
    for strategy, color in zip(ordered, cycle(palette.CURVES), strict=False):
        shares = [counts[strategy][bucket] / totals[bucket] for bucket in sorted(totals)]
        bars.append(make_bars(strategy, color, (names, shares)))
    return Panel(
        key="strategies",
        title="Strategy by batch size",
        note="Share of the passes at that batch size, all ranks; off is plain decoding, else steps_topk_tokens.",
        data=bars,
        layout=make_layout("running requests on the rank", "share", x={"type": "category"}),
        absent=_absent(run, "speculation/"),
    )


def _name_of(bucket: int) -> str:
    low, high = (1 << bucket >> 1) + 1, 1 << bucket
    return f"{low}–{high}" if low < high else f"{high}"


def _absent(run: RunData, what: str) -> str:
    of_speculation = what.startswith(("rollout/spec", "speculation"))
    if of_speculation and not run.is_on("speculation"):
        return "Speculation was off (speculation.enabled=false)."
    return f"The run wrote no {what}."
