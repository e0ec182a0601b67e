"""The benchmarks of RL steps compare equal work, and their figures are those of a calculation by
hand.
"""

from __future__ import annotations

import math

import pytest

from tools.bench.step import (
    idle_figures,
    num_same_steps,
    phase_seconds,
    speedups,
    timed_steps,
    with_a_tail,
)
from tools.commands.compare_runs import STEP_SECONDS, Run, StepRecord


def make_run(
    seconds: list[float], token: int = 3, reward: float = 1.0, **metrics: list[float]
) -> Run:
    """One response per step."""
    return {
        step: StepRecord(
            metrics={STEP_SECONDS: value}
            | {name.replace("__", "/"): values[step - 1] for name, values in metrics.items()},
            responses={(0, 0): ((1, 2, token), reward)},
        )
        for step, value in enumerate(seconds, start=1)
    }


def test_speedups_compare_step_with_step_and_the_sums() -> None:
    ratios = speedups(make_run([9.0, 4.0, 2.0]), make_run([1.0, 1.0, 2.0]), [2, 3])
    assert ratios == {"median": 2.5, "min": 1.0, "max": 4.0, "total": 2.0}


def test_phases_are_means_over_the_timed_steps_alone() -> None:
    """The first step of every round is not timed."""
    assert timed_steps(9, 3) == [2, 3, 5, 6, 8, 9]
    run = make_run([5.0, 2.0, 4.0], timing_s__gen=[5.0, 1.0, 2.0])
    assert phase_seconds(run, [2, 3]) == {"gen": 1.5, "step": 3.0}


def test_idle_figures_are_shares_of_sums_and_preemptions_of_steps_that_had_one() -> None:
    run = make_run(
        [9.0, 4.0, 6.0],
        bubble__idle_s=[5.0, 2.0, 3.0],
        bubble__used_s=[0.0, 2.0, 2.0],
        bubble__stall_s=[3.0, 0.1, 0.1],
        spot__preempt_ms=[7.0, 0.0, 3.0],
        spot__updates=[0.0, 3.0, 4.0],
    )
    figures = idle_figures(run, [2, 3])
    assert figures["idle_used_fraction"] == pytest.approx(0.8)
    assert figures["stall_fraction"] == pytest.approx(0.02)
    assert figures["preempt_ms"] == {"median": 3.0, "min": 3.0, "max": 3.0}
    assert figures["updates_per_step"] == 3.5
    assert math.isnan(idle_figures(make_run([1.0, 1.0]), [1, 2])["idle_used_fraction"])


def test_steps_with_other_tokens_are_counted_and_rewards_do_not_matter() -> None:
    run = make_run([1.0, 1.0])
    assert num_same_steps(run, make_run([1.0, 1.0], reward=0.0), [1, 2]) == 2
    assert num_same_steps(run, make_run([1.0, 1.0], token=4), [1, 2]) == 0


def test_every_step_of_the_ordered_prompts_holds_exactly_one_long_one() -> None:
    ordered = with_a_tail(range(40), num_prompts=4, seed=0)
    assert len(set(ordered)) == len(ordered) == 16  # 4 long ones, a step for each
    long = [[length >= 36 for length in ordered[i : i + 4]] for i in range(0, 16, 4)]
    assert [sum(step) for step in long] == [1, 1, 1, 1]
    assert len({step.index(True) for step in long}) > 1  # not always on the same rank
    assert ordered == with_a_tail(range(40), num_prompts=4, seed=0)
