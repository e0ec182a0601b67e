"""The panels of the report below its timeline: metrics over RL steps, as figures.yaml lists them,
and the strategies that were chosen.

If a run did not do something, its panel has a sentence and no data.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import cycle

from tools.run_report import palette
from tools.run_report.data import RunData
from tools.run_report.figure import Json, Panel, declared, make_bars, make_curve, make_layout
from tools.run_report.rank_panel import build_rank_panel


def build_panels(run: RunData, steps: tuple[int, int] | None) -> list[Panel]:
    """Return all panels in the order of the page.

    `steps` is the window of the timeline; None: the last two.
    """
    step_time, *others = (_over_steps(run, row) for row in declared()["over_steps"])
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
        for metric, (title, y_label) in declared()["compared"].items()
    ]


def _over_steps(run: RunData, row: Json) -> Panel:
    """Return the panel of a row of figures.yaml, with those of its metrics that the run wrote."""
    written = {}
    for label, metric in row["metrics"].items():
        prefix, star, _ = metric.partition("*")
        names = run.names_after(prefix) if star else [""] if run.series(metric)[0] else []
        written |= {label.replace("*", name): prefix + name for name in names}
    make = make_bars if row.get("is_stacked") else make_curve
    values = [v for metric in written.values() for v in run.series(metric)[1] if v]
    # 1, 2 and 5 of each power of ten: where none of them is in sight, plotly chooses
    ticks = {"dtick": "D2"} if values and max(values) > 4 * min(values) else {}
    log_axis = {"type": "log", "tickformat": ",", **ticks}
    return Panel(
        key=row["key"],
        title=row["title"],
        note=row.get("note", ""),
        data=[
            make(label, color, run.series(metric))
            for (label, metric), color in zip(written.items(), cycle(palette.CURVES), strict=False)
            if metric not in row.get("left_out", [])
        ],
        layout=make_layout("RL step", row["y_label"], y=log_axis if row.get("is_log") else {}),
        absent=_absent(run, next(iter(row["metrics"].values()))),
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
    of_speculation = what.startswith(("rollout/spec", "spec"))
    if of_speculation and not run.config.get("speculation", {}).get("enabled"):
        return "Speculation was off (speculation.enabled=false)."
    return f"The run wrote no {what}."
