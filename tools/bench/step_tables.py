"""The tables of tools/bench/step.py: one function each, from the values that go into its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from tools.bench.measure import make_table

_OVERLAPPING = ("wait",)  # spent on idle ranks while others generate


def print_phases(
    console: Console, phases: Mapping[str, Mapping[str, float]], share: float, *, num_timed: int
) -> None:
    """Print mean seconds of a step by variant. `share` is the share of the rollouts with speculation off."""
    table = make_table(f"mean seconds of an RL step, {num_timed} timed steps", "phase", *phases)
    names = list(dict.fromkeys(name for seconds in phases.values() for name in seconds))
    names = [name for name in names if name not in (*_OVERLAPPING, "step")]
    for name in (*names, "other", "step"):
        cells = []
        for seconds in phases.values():
            other = seconds["step"] - sum(seconds.get(part, 0.0) for part in names)
            value = other if name == "other" else seconds.get(name)
            cells.append("-" if value is None else f"{value:.3f}")
        table.add_row(name, *cells)
    console.print(table)
    console.print(f"rollouts are {share:.0%} of a step without speculation")


def print_speedups(console: Console, result: Mapping[str, Any]) -> None:
    """Print speed-ups over speculation off, by variant; "all" are ratios of sums."""
    columns = ("step", "all steps", "rollout", "all rollouts", "equal tokens")
    title = "speed-up over speculation off, median (min-max) by step"
    table = make_table(title, "variant", *columns)
    same = result["steps_with_equal_tokens"]
    for variant in result["step_speedup"]:
        cells = []
        for values in (result["step_speedup"][variant], result["rollout_speedup"][variant]):
            cells += [f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"]
            cells += [f"{values['total']:.2f}"]
        table.add_row(variant, *cells, f"{same[variant]} of {same['of']}")
    console.print(table)


def print_idle(console: Console, idle: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the use of idle rank-seconds and its cost, from the second step on."""
    columns = ("idle s", "used", "stall", "preempt ms", "longest", "updates/step")
    table = make_table("spot training, from the second step on", "variant", *columns)
    for variant, figures in idle.items():
        preempt = figures["preempt_ms"] or {"median": float("nan"), "max": float("nan")}
        table.add_row(
            variant,
            f"{figures['idle_s']:.1f}",
            f"{figures['idle_used_fraction']:.0%}",
            f"{figures['stall_fraction']:.2%}",
            f"{preempt['median']:.1f}",
            f"{preempt['max']:.1f}",
            f"{figures['updates_per_step']:.1f}",
        )
    console.print(table)


def print_by_step(
    console: Console, title: str, columns: Mapping[str, Sequence[float | None]]
) -> None:
    """Print values by RL step; "-" for a step without one, such as an accept length if nothing was drafted."""
    table = make_table(title, "step", *columns)
    for step, values in enumerate(zip(*columns.values(), strict=True), start=1):
        table.add_row(str(step), *("-" if value is None else f"{value:.2f}" for value in values))
    console.print(table)
