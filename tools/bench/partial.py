"""Measures TLT, partial rollouts and both in time to a held-out accuracy, on one task with the same seeds.

    python -m tools.bench partial
    python -m tools.bench partial --quick

Variants: `synchronous` (no speculation), `tlt`, `partial` (rollout.partial_rollout_tokens) and `tlt_partial`. The drafter of TLT
starts from random weights. Every seed is a round of all variants. The order rotates, so that other load on the machine meets all
of them. Seconds are those of RL steps, without evaluations, and a ratio compares two runs of one round.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from tools.bench.measure import print_table
from tools.bench.step import Launcher, turned
from tools.bench.step_measures import STEP_SECONDS
from tools.run_report.data import read_metrics

SYNCHRONOUS = "synchronous"
ACCURACY = "eval/accuracy"
# of `summarize`, then two ratios to synchronous
_TITLES = ("steps", "seconds", "step s", "gen s", "accuracy", "age", "x step s", "x seconds")
QUICK = {"seeds": 1, "steps": 2, "eval_interval": 1, "target": 0.0}
Row = Mapping[str, float | None]
Figures = dict[str, float | None]


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--config", default="examples/quickstart.yaml")
    add("--ranks", type=int, default=2)
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=30)
    add("--eval-interval", type=int, default=3)
    add("--target", type=float, default=0.9, help="held-out accuracy")
    add("--round-tokens", type=int, default=200, help="rollout.partial_rollout_tokens")
    add("--drawn", type=int, default=12, help="rollout.over_sampling_prompts")
    add("overrides", nargs="*", metavar="section.key=value")


def variants(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Return settings by variant."""
    plain = ("speculation.enabled=false", "spot.enabled=false")
    carry = (
        f"rollout.partial_rollout_tokens={options.round_tokens}",
        f"rollout.over_sampling_prompts={options.drawn}",
        "algorithm.tis_cap=2",
    )
    return {SYNCHRONOUS: plain, "tlt": (), "partial": (*plain, *carry), "tlt_partial": carry}


def summarize(rows: Sequence[Row], target: float) -> Figures:
    """Return the figures of one run from its metrics: steps and evaluations in the order of writing.

    Steps and seconds to the target are None if no evaluation reaches it.
    """
    steps = [row for row in rows if STEP_SECONDS in row]
    scores = {row["step"]: row[ACCURACY] for row in rows if row.get(ACCURACY) is not None}
    reached = min((step for step, score in scores.items() if score >= target), default=None)
    seconds = [row[STEP_SECONDS] for row in steps]
    spent = [s for row, s in zip(steps, seconds, strict=True) if row["step"] <= (reached or 0)]
    return {
        "steps_to_target": reached,
        "seconds_to_target": None if reached is None else sum(spent),
        "step_s": sum(seconds) / len(seconds),
        "gen_s": sum(row["timing_s/gen"] for row in steps) / len(steps),
        "accuracy": scores[max(scores)],
        "policy_age": sum(row.get("rollout/policy_age/mean", 0.0) for row in steps) / len(steps),
    }


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Run all variants in rounds and print the table. Return the values of the JSON."""
    settings = variants(options)
    found: dict[str, list[Figures]] = {name: [] for name in settings}
    with tempfile.TemporaryDirectory(prefix="bench-partial-") as folder:
        launcher = Launcher(
            root=Path(folder),
            config=options.config,
            ranks=options.ranks,
            overrides=(
                *(f"eval.interval={options.eval_interval}", "checkpoint.at_end=false"),
                *("checkpoint.export_hf=false", "speculation.measure_gain=false"),
                *options.overrides,
            ),
            console=console,
        )
        for seed in range(options.seeds):
            for name in turned(list(settings), seed):
                place = f"{name}-{seed}"
                launcher.run(place, options.steps, f"run.seed={seed}", *settings[name])
                rows = list(read_metrics(launcher.root / place / "metrics.jsonl"))
                found[name].append(summarize(rows, options.target))
    print_table(
        console,
        f"by seed; steps and seconds to accuracy {options.target:g}; x: of synchronous",
        ("variant", *_TITLES),
        [_cells(runs, found[SYNCHRONOUS], name) for name, runs in found.items()],
    )
    return {"runs": found, "target": options.target, "settings": settings}


def _cells(runs: Sequence[Figures], base: Sequence[Figures], name: str) -> list[str]:
    """Return a row: each figure by seed, and two figures divided by those of `base`."""
    columns: list[list[float | None]] = [[run[key] for run in runs] for key in runs[0]]
    for key in ("step_s", "seconds_to_target"):
        pairs = [(run[key], other[key]) for run, other in zip(runs, base, strict=True)]
        columns.append([a / b if a is not None and b else None for a, b in pairs])
    return [
        name,
        *(", ".join("-" if v is None else f"{v:.3g}" for v in values) for values in columns),
    ]
