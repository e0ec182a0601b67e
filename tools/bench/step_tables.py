"""The tables of tools/bench/step.py: one function each, from the values that go into its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from tools.bench.measure import print_table

_NO_PART = ("step", "wait")  # ranks wait while others generate


def print_phases(
    console: Console, phases: Mapping[str, Mapping[str, float]], share: float, *, num_timed: int
) -> None:
    """Print mean seconds of a step by variant. `share` is the share of the rollouts with speculation off."""
    names = dict.fromkeys(name for of in phases.values() for name in of if name not in _NO_PART)
    columns = [
        {**of, "other": of["step"] - sum(of.get(name, 0.0) for name in names)}
        for of in phases.values()
    ]
    rows = (
        [name, *(f"{of[name]:.3f}" if name in of else None for of in columns)]
        for name in (*names, "other", "step")
    )
    title = f"mean seconds of an RL step, {num_timed} timed steps"
    print_table(console, title, ("phase", *phases), rows)
    console.print(f"rollouts are {share:.0%} of a step without speculation")


def print_speedups(console: Console, result: Mapping[str, Any]) -> None:
    """Print speed-ups over speculation off, by variant; "all" are ratios of sums."""
    same = result["steps_with_equal_tokens"]
    rows = []
    for variant in result["step_speedup"]:
        cells = []
        for values in (result["step_speedup"][variant], result["rollout_speedup"][variant]):
            cells += [f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"]
            cells += [values["total"]]
        rows.append([variant, *cells, f"{same[variant]} of {same['of']}"])
    title = "speed-up over speculation off, median (min-max) by step"
    columns = ("variant", "step", "all steps", "rollout", "all rollouts", "equal tokens")
    print_table(console, title, columns, rows)


def print_idle(console: Console, idle: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the use of idle rank-seconds and its cost, from the second step on."""
    rows = []
    for variant, figures in idle.items():
        preempt = figures["preempt_ms"] or {"median": float("nan"), "max": float("nan")}
        shares = [f"{figures['idle_used_fraction']:.0%}", f"{figures['stall_fraction']:.2%}"]
        last = (preempt["median"], preempt["max"], figures["updates_per_step"])
        rows.append(
            [variant, f"{figures['idle_s']:.1f}", *shares, *(f"{value:.1f}" for value in last)]
        )
    columns = ("variant", "idle s", "used", "stall", "preempt ms", "longest", "updates/step")
    print_table(console, "spot training, from the second step on", columns, rows)


def print_by_step(
    console: Console, title: str, columns: Mapping[str, Sequence[float | None]]
) -> None:
    """Print values by RL step; "-" for a step without one, such as an accept length if nothing was drafted."""
    rows = ([str(step), *row] for step, row in enumerate(zip(*columns.values(), strict=True), 1))
    print_table(console, title, ("step", *columns), rows)
