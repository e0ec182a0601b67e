"""Measures TLT, partial rollouts and both in time to a held-out accuracy, with the same seeds.

    python -m tools.bench partial

Variants: `synchronous` (no speculation), `tlt`, `partial` (rollout.partial_rollout_tokens) and
`tlt_partial`. The drafter of TLT starts from random weights. Every seed is a round of all variants,
in rotating order. Seconds are those of RL steps, without evaluations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tools.bench.measure import print_table
from tools.bench.step import launching, turned
from tools.commands.compare_runs import STEP_SECONDS
from tools.run_report.data import read_metrics

_ACCURACY = "eval/accuracy"
_PLAIN = ("speculation.enabled=false", "spot.enabled=false")
_CARRY = (
    "rollout.partial_rollout_tokens=200",
    "rollout.over_sampling_prompts=12",
    "algorithm.tis_cap=2",
)
_VARIANTS = {"synchronous": _PLAIN, "tlt": (), "partial": (*_PLAIN, *_CARRY), "tlt_partial": _CARRY}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--config", default="examples/quickstart.yaml")
    add("--ranks", type=int, default=2)
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=30)
    add("--eval-interval", type=int, default=3)
    add("--target", type=float, default=0.9, help="held-out accuracy")
    add("overrides", nargs="*", metavar="section.key=value")


def summarize(rows: Sequence[Mapping[str, Any]], target: float) -> dict[str, float | None]:
    """Return the figures of one run from its metrics by step; None for a target that no evaluation
    reaches.
    """
    scores = {row["step"]: row[_ACCURACY] for row in rows if row.get(_ACCURACY) is not None}
    reached = min((step for step, score in scores.items() if score >= target), default=None)
    steps = [row for row in rows if STEP_SECONDS in row]
    spent = [row[STEP_SECONDS] for row in steps if row["step"] <= (reached or 0)]
    return {
        "steps to target": reached,
        "seconds to target": None if reached is None else sum(spent),
        "step s": fmean(row[STEP_SECONDS] for row in steps),
        "accuracy": scores[max(scores)],
        "policy age": fmean(row.get("rollout/policy_age/mean", 0.0) for row in steps),
    }


def run(options: argparse.Namespace) -> dict[str, object]:
    """Run all variants in rounds and print the table. Return the values of the JSON."""
    found: dict[str, list[dict[str, float | None]]] = {name: [] for name in _VARIANTS}
    quiet = ("checkpoint.export_hf=false", "speculation.measure_gain=false")
    with launching(options, f"eval.interval={options.eval_interval}", *quiet) as launch:
        for seed in range(options.seeds):
            for name in turned(list(_VARIANTS), seed):
                settings = (f"run.seed={seed}", *_VARIANTS[name])
                ran = launch(f"{name}-{seed}", options.steps, *settings)
                found[name].append(summarize(read_metrics(ran / "metrics.jsonl"), options.target))
    rows = [
        [name, *(", ".join(_text(of[key]) for of in runs) for key in runs[0])]
        for name, runs in found.items()
    ]
    title = f"by seed; target: held-out accuracy {options.target:g}"
    print_table(title, ("variant", *found["tlt"][0]), rows)
    return {"runs": found, "target": options.target}


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
