"""BEG-MAB on examples worked by hand."""

from __future__ import annotations

import pytest

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.beg_mab import BegMabSelector, automatic_thresholds

WIDE, LONG, SHORT = (SpeculationStrategy.parse(text) for text in ("8_4_48", "8_4_16", "4_4_16"))


def test_the_largest_budget_goes_to_the_smallest_batches() -> None:
    """Budgets 48, 16, 0 and thresholds 1, 6, 33: batches 1-5, 6-32, 33 and above."""
    selector = BegMabSelector([OFF, LONG, WIDE], epsilon=0.0)
    decisions = [selector.choose(size) for size in (1, 5, 6, 32, 33, 500)]
    assert [d.strategy for d in decisions] == [WIDE, WIDE, LONG, LONG, OFF, OFF]
    assert {decision.reason for decision in decisions} == {"only"}


def test_automatic_thresholds_grow_by_one_factor_up_to_half_of_the_largest_batch() -> None:
    """32^(i/4): 1, 2.4, 5.7, 13.5; plain decoding above 32. Without OFF, 64^(i/2): 1, 8."""
    four = [SpeculationStrategy.parse(text) for text in ("8_4_48", "8_4_32", "8_4_16", "8_4_8")]
    assert automatic_thresholds([*four, OFF], 64) == (1, 2, 6, 13, 33)
    assert automatic_thresholds(four[:2], 64) == (1, 8)
    assert automatic_thresholds([OFF], 64) == (1,)
    assert automatic_thresholds([*four, OFF], 4) == (1, 2, 3, 4, 5)
    selector = BegMabSelector([WIDE, LONG, SHORT, OFF], max_batch_size=64, epsilon=0.0)
    chosen = [selector.choose(size).strategy for size in (1, 5, 6, 32, 33)]
    assert chosen == [WIDE, WIDE, LONG, LONG, OFF]


def test_greedy_choice_is_the_median_of_the_window() -> None:
    """Rewards by hand, batch size 10, 1 s: 10 requests + accepted. Window 3.

    LONG: 30 (all accept 2: 10 + 20), 20, 90 -> median 30. SHORT: 23, 25 -> median 24. Then LONG
    gets 20, its first 30 leaves the window: 20, 90, 20 -> median 20, and SHORT leads. (Of all four
    the median would be 25.)
    """
    selector = BegMabSelector([WIDE, LONG, SHORT], epsilon=0.0, window=3)
    assert selector.choose(10).strategy == LONG  # without rewards: in the order given
    selector.observe(LONG, 10, [10, 10], 1.0)
    assert selector.choose(10).strategy == SHORT  # never tried
    for accepted in (13, 15):
        selector.observe(SHORT, 10, [10, accepted - 10], 1.0)
    for counts in ([10], [10, 10, 10, 10, 10, 10, 10, 10]):
        selector.observe(LONG, 10, counts, 1.0)
    assert selector.choose(10).strategy == LONG
    selector.observe(LONG, 10, [10], 1.0)
    assert selector.choose(10).strategy == SHORT


def test_epsilon_is_the_share_of_uniform_draws() -> None:
    """4,000 choices at epsilon 0.2: 800 explore and half of them draw the loser; 5 standard errors,
    1e-6.
    """
    selector = BegMabSelector([LONG, SHORT], epsilon=0.2, seed=3)
    selector.observe(LONG, 1, [1] * 8, 1.0)
    selector.observe(SHORT, 1, [0], 1.0)
    decisions = [selector.choose(1) for _ in range(4000)]
    reasons = [decision.reason for decision in decisions]
    chosen = [decision.strategy for decision in decisions]
    assert reasons.count("explore") == pytest.approx(800, abs=126)
    assert chosen.count(SHORT) == pytest.approx(400, abs=95)
