"""What is learned of seconds, and what a pause of the learned drafter costs."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from tests.synthetic_decoding import ARMS
from tlt_megatron.speculation.step_cost import CatchUpCost, StepCostModel
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

ALL = (OFF, *ARMS)


def seconds_of(strategy: SpeculationStrategy, batch_size: int) -> float:
    rows, drafted = batch_size * strategy.num_rows, strategy.num_steps * batch_size * strategy.topk
    return 0.02 + 2e-4 * rows + 1e-3 * strategy.num_steps + 5e-5 * drafted


def estimate(model: StepCostModel, strategy: SpeculationStrategy, batch_size: int) -> float:
    return float(model.estimates(batch_size).seconds_S[ALL.index(strategy)])


def test_strategies_and_batch_sizes_never_run_are_predicted() -> None:
    """Five (strategy, batch size) pairs tell the rest."""
    model = StepCostModel(ALL, half_life=50_000)
    seen = [(OFF, 60), (OFF, 8), (ARMS[0], 20), (ARMS[4], 10), (ARMS[2], 4)]
    for _ in range(10):
        for strategy, batch_size in seen:
            model.observe(strategy, batch_size, seconds_of(strategy, batch_size))
        model.fit(5)
    for strategy in ALL:
        for batch_size in (4, 10, 30):
            expected = seconds_of(strategy, batch_size)
            assert estimate(model, strategy, batch_size) == pytest.approx(expected, rel=0.15)


def test_comparisons_are_surer_than_what_is_compared() -> None:
    """Times come and go for all strategies alike."""
    model = StepCostModel(ALL, half_life=50_000)
    for _ in range(30):
        for strategy in ALL[:2]:
            model.observe(strategy, 4, seconds_of(strategy, 4))
        model.fit(2)
    model.fit(200)  # nobody has looked for long
    known = model.estimates(4).covariance_SS
    difference = known[0, 0] + known[1, 1] - 2 * known[0, 1]
    assert difference < 0.3 * min(known[0, 0], known[1, 1])


def test_strategy_measured_in_slow_times_is_not_held_to_be_slow() -> None:
    """Plain steps become 1.5 times as slow little by little, and only then a chain runs for the first time."""
    model = StepCostModel(ALL, half_life=50_000)
    for step in range(200):
        slow = 1.0 + 0.5 * step / 200
        model.observe(OFF, 4, slow * seconds_of(OFF, 4))
        if step >= 180:
            model.observe(ARMS[1], 4, slow * seconds_of(ARMS[1], 4))
        model.fit(1)
    ratio = estimate(model, ARMS[1], 4) / estimate(model, OFF, 4)
    assert ratio == pytest.approx(seconds_of(ARMS[1], 4) / seconds_of(OFF, 4), rel=0.06)


def test_hiccup_of_the_machine_hardly_moves_a_known_cost() -> None:
    model = StepCostModel(ALL, half_life=50_000)
    for step in range(60):
        model.observe(OFF, 4, 0.010 if step != 40 else 1.0)
        model.fit(1)
    assert estimate(model, OFF, 4) == pytest.approx(0.010, rel=0.03)


def test_three_slow_steps_make_a_suspect_and_fast_ones_clear_it() -> None:
    model = StepCostModel(ALL, half_life=50_000)
    for _ in range(20):
        model.observe(OFF, 1, seconds_of(OFF, 1))
        model.fit(1)
    before = estimate(model, ARMS[2], 1)
    for slow, is_suspect in ((5.0, True), (1.0, False)):
        for _ in range(3):
            model.observe(ARMS[2], 1, slow * seconds_of(ARMS[2], 1))
        model.fit(3)
        assert (ALL.index(ARMS[2]) in model.suspects) == is_suspect
        assert estimate(model, ARMS[2], 1) < 1.5 * before


def test_retrieval_has_no_price_of_draft_steps() -> None:
    """Learned chains whose draft steps are dear say nothing bad about retrieval, which verifies as many rows."""
    chain, retrieval = (SpeculationStrategy.parse(text) for text in ("4_1_4", "ngram_4"))
    model = StepCostModel((OFF, chain, retrieval), half_life=50_000)
    for _ in range(30):
        model.observe(OFF, 2, 0.010)
        model.observe(chain, 2, 0.030)
        model.fit(2)
    plain_s, chain_s, retrieval_s = model.estimates(2).seconds_S
    assert retrieval_s < plain_s + 0.4 * (chain_s - plain_s)


def test_catching_up_is_priced_by_what_was_written() -> None:
    """2 us a token: 4 requests write 5000 tokens, then one of them ends."""
    price = CatchUpCost()
    price.resize(0, 4)
    price.caught_up(None)
    assert not price.is_due
    for _ in range(2):
        price.wrote(5000)
        assert price.is_due
        price.caught_up(5000 * 2e-6)
    price.wrote(5000)
    price.resize(4, 3)
    assert price.expected_s(0.0) == pytest.approx(3750 * 2e-6, rel=0.05)
    restored = CatchUpCost()
    restored.load_state_dict(json.loads(json.dumps(price.state_dict())))
    assert not restored.is_due
    restored.wrote(3750)
    assert restored.expected_s(0.0) == pytest.approx(price.expected_s(0.0))


def test_noise_of_short_pauses_is_not_taken_for_the_price_of_long_ones() -> None:
    """2 ms too long after 40 tokens; 8000 tokens at that price would take 400 ms."""
    price = CatchUpCost()
    price.wrote(40)
    price.caught_up(2e-3)
    price.wrote(8000)
    assert price.expected_s(0.0) < 4e-3


def test_price_never_paid_is_a_share_of_the_rows_of_the_target() -> None:
    """A twentieth of 10 us for each of 100 tokens."""
    price = CatchUpCost()
    price.wrote(100)
    assert price.expected_s(1e-5) == pytest.approx(100 * 0.05 * 1e-5)


@pytest.mark.parametrize("deviation", [0.3, 2.0, 6.0])
def test_seconds_stay_positive_whatever_was_measured(deviation: float) -> None:
    """Seconds without any sense, up to e to the 12th apart: the law's parts pull each other below 0."""
    for seed in range(3):
        rng, model = random.Random(seed), StepCostModel(ALL, half_life=50_000)
        for _ in range(60):
            for _ in range(rng.randint(1, 4)):
                seconds = 0.02 * math.exp(rng.gauss(0.0, deviation))
                model.observe(rng.choice(ALL), rng.choice((1, 2, 8, 64, 256)), seconds)
            model.fit(rng.choice((1, 10, 500)))
            seconds_S = model.estimates(rng.choice((1, 3, 64, 300))).seconds_S
            assert np.isfinite(seconds_S).all()
            assert (seconds_S > 0.0).all()
