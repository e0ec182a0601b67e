"""Finds the rank that decodes slower than the others at equal work, and what that costs a step.

A rollout is long because of its responses or because of its machine. Passes of equal strategy and
about equal batch size tell the two apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tlt_megatron.rollout.speculation_log import PassTotals

Costs = Mapping[str, Sequence[float]]  # by kind of pass: how many, and their seconds

# A rank is reported if it is so many times slower than the others, and costs this share of a step.
SLOWDOWN, COST_SHARE = 2.0, 0.05


def pass_costs(totals: Iterable[PassTotals]) -> dict[str, list[float]]:
    """Return the passes of a rank by strategy and batch size, which is rounded up to a power of
    two, as JSON types.
    """
    costs: dict[str, list[float]] = {}
    for total in totals:
        kind = f"{total.strategy} {(total.batch_size - 1).bit_length()}"
        count, seconds = costs.get(kind, (0, 0.0))
        costs[kind] = [count + total.passes, seconds + total.seconds]
    return costs


def slowest_rank(costs: Sequence[Costs], ends: Sequence[float]) -> dict[str, float]:
    """Return metrics of the slowest rank: its number, its slowdown, and the seconds that the others
    waited because of it.

    `costs` are the `pass_costs` of each rank, and `ends` the moments at which their rollouts ended.
    {} if no two ranks had passes of one kind.
    """
    counts, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    for each in costs:
        for kind, (count, taken) in each.items():
            counts[kind] += count
            seconds[kind] += taken
    slowdowns = []
    for rank, each in enumerate(costs):
        shared = {kind: own for kind, own in each.items() if counts[kind] > own[0]}
        expected = sum(n * (seconds[k] - s) / (counts[k] - n) for k, (n, s) in shared.items())
        if expected:
            taken = sum(own[1] for own in shared.values())
            slowdowns.append((taken / expected, rank, taken - expected))
    if not slowdowns:
        return {}
    slowdown, rank, lost_s = max(slowdowns)
    wait_s = ends[rank] - max(end for other, end in enumerate(ends) if other != rank)
    return {
        "perf/slowest_rank/rank": float(rank),
        "perf/slowest_rank/slowdown": slowdown,
        "perf/slowest_rank/cost_s": max(0.0, min(lost_s, wait_s)),
    }


def describe(metrics: Mapping[str, float | None], step_s: float) -> str:
    """Return a sentence about a rank that costs a step much; "" if there is none."""
    slowdown = metrics.get("perf/slowest_rank/slowdown") or 0.0
    cost_s = metrics.get("perf/slowest_rank/cost_s") or 0.0
    if slowdown < SLOWDOWN or cost_s < COST_SHARE * step_s:
        return ""
    return (
        f"rank {metrics['perf/slowest_rank/rank']:.0f} decodes {slowdown:.1f} times as slow as the others at equal"
        f" work: they wait {cost_s:.3g} s of a step for it. Look at its machine (clocks, other jobs, memory)"
    )
