"""Which rank decodes slower than the others at equal work, and what it costs."""

from __future__ import annotations

import pytest

from tests.unit.rollout.test_speculation_log import make_pass
from tlt_megatron.rollout.slow_rank import describe, pass_costs, slowest_rank
from tlt_megatron.rollout.speculation_log import sum_passes


def test_passes_are_compared_by_strategy_and_about_equal_batch_size() -> None:
    passes = [make_pass(0.0, batch_size, "off") for batch_size in (5, 5, 8)]
    passes += [make_pass(0.0, 1, "2_1_2")] * 2
    totals = sum_passes(passes, step=1, rank=0)
    assert pass_costs(totals) == {"off 3": [3, 0.75], "2_1_2 0": [2, 0.5]}


def test_the_slowest_rank_is_that_of_the_largest_slowdown_and_not_of_the_longest_rollout() -> None:
    long = {"off 0": [1000, 10.0], "off 3": [10, 0.2]}  # a long tail at the speed of the others
    usual = {"off 0": [100, 1.0], "off 3": [10, 0.2]}
    slow = {"off 0": [100, 5.0], "off 3": [10, 1.0], "8_1_8 0": [7, 9.0]}  # the last: no one else
    found = slowest_rank([long, usual, slow], ends=[10.2, 1.2, 15.0])
    assert found == {
        "perf/slowest_rank/rank": 2,
        "perf/slowest_rank/slowdown": pytest.approx(5.0),
        "perf/slowest_rank/cost_s": pytest.approx(4.8),  # without it the long tail ends at 10.2
    }
    # The others wait for the long tail all the same.
    assert slowest_rank([long, usual, slow], [10.2, 1.2, 6.0])["perf/slowest_rank/cost_s"] == 0


def test_ranks_without_passes_of_one_kind_are_not_compared() -> None:
    assert slowest_rank([{"off 0": [10, 1.0]}, {}], [1.0, 0.0]) == {}
    assert slowest_rank([{}], [1.0]) == {}


@pytest.mark.parametrize(
    ("slowdown", "cost_s", "is_told"), [(1.9, 5.0, False), (2.0, 0.4, False), (2.0, 0.5, True)]
)
def test_a_rank_is_told_of_that_costs_a_twentieth_of_the_step(
    slowdown: float, cost_s: float, is_told: bool
) -> None:
    metrics = {"perf/slowest_rank/rank": 3.0, "perf/slowest_rank/slowdown": slowdown}
    sentence = describe(metrics | {"perf/slowest_rank/cost_s": cost_s}, step_s=10.0)
    assert sentence.startswith("rank 3 decodes 2.0 times as slow") is is_told
    assert bool(sentence) is is_told
