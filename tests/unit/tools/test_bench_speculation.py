"""What the benchmark of speculation compares with what."""

from __future__ import annotations

import pytest

from tools.bench.interleaved import PLAIN, Comparison, Record, with_plain
from tools.bench.measure import first_differences
from tools.bench.speed import BEG_MAB, COST_MODEL, best_fixed, compare_selectors


def test_plain_decoding_runs_on_both_sides_of_every_variant() -> None:
    assert with_plain(["a", "b", "x"]) == [PLAIN, "a", PLAIN, "b", PLAIN, "x", PLAIN]
    assert with_plain([]) == [PLAIN]


@pytest.mark.parametrize(
    ("other", "differing", "compared"),
    [
        ([1, 2, 3, 4], 0, 4),
        ([1, 9, 8, 7], 1, 2),  # what follows a difference is not compared
        ([1, 2, 3, 4, 5], 1, 4),  # one of them had to draw a stop token there
        ([1, 2, 3], 1, 3),
    ],
)
def test_a_response_that_ends_earlier_differs(
    other: list[int], differing: int, compared: int
) -> None:
    assert first_differences([([1, 2, 3, 4], other)]) == (differing, compared)


def test_the_first_round_warms_up_and_does_not_count() -> None:
    assert Record(ratios=[0.5, 2.0, 1.0, 3.0]).ratio == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert Record(ratios=[0.5]).ratio["median"] == pytest.approx(0.5)


def test_the_best_strategy_is_that_of_all_batch_sizes() -> None:
    ratios = {1: {"a": 4.0, "b": 2.0, COST_MODEL: 3.0}, 8: {"a": 1.0, "b": 1.5, COST_MODEL: 1.5}}
    measured = {size: Comparison(None, {}) for size in ratios}
    for size, by_name in ratios.items():
        measured[size].records = {
            name: Record(ratios=[9.0, ratio]) for name, ratio in (by_name | {BEG_MAB: 1.0}).items()
        }
    assert best_fixed(measured, ["a", "b"]) == "b"
    found = compare_selectors(measured, "b")
    assert found[COST_MODEL] == pytest.approx(2 / (1 / 1.5 + 1))
