"""What is learned of acceptance: shared over strategies, kept apart by drafter, and forgotten after a jump."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.synthetic_decoding import ARMS
from tlt_megatron.speculation.acceptance_model import AcceptanceModel
from tlt_megatron.speculation.strategy import SpeculationStrategy


def parse(*texts: str) -> list[SpeculationStrategy]:
    return [SpeculationStrategy.parse(text) for text in texts]


def feed(
    model: AcceptanceModel, strategy: SpeculationStrategy, counts: list[int], num: int
) -> None:
    """`num` steps of 100 requests."""
    for _ in range(num):
        model.observe(strategy, 100, counts)
        model.fit(1)


def test_one_strategy_informs_the_acceptance_of_all() -> None:
    """Only a chain of 4 runs; a deeper chain and a tree are then estimated from it, with more doubt about the tree."""
    model, chain, deeper, tree = AcceptanceModel(ARMS), 1, 2, 4
    before = model.estimates()
    feed(model, ARMS[chain], [30, 9, 3, 1], 50)
    after = model.estimates()
    assert after.mean_S[chain] == pytest.approx(0.43, abs=0.03)
    assert after.mean_S[deeper] == pytest.approx(0.43, abs=0.04)
    assert 0.5 < after.mean_S[tree] < 1.3
    doubts = [after.covariance_SS[arm][arm] for arm in (chain, deeper, tree)]
    assert doubts[0] <= doubts[1] < doubts[2] < 0.5 * before.covariance_SS[tree][tree]


def test_retrieval_and_the_learned_drafter_say_nothing_of_each_other() -> None:
    chain, retrieval = parse("4_1_4", "ngram_4")
    model = AcceptanceModel([chain, retrieval])
    before = model.estimates()
    feed(model, chain, [90, 81, 73, 66], 30)
    after = model.estimates()
    assert after.mean_S[0] == pytest.approx(3.1, abs=0.1)
    assert after.mean_S[1] == pytest.approx(before.mean_S[1])
    assert after.covariance_SS[1, 1] == pytest.approx(before.covariance_SS[1, 1], rel=0.05)


def test_hybrid_is_estimated_from_its_parts() -> None:
    """Learned 0.6 and retrieved 0.5 at each depth, independent: 1 - 0.4 * 0.5 = 0.8, of which some is taken as shared."""
    chain, retrieval, hybrid = parse("4_1_4", "ngram_4", "4_1_4+ngram_4")
    model = AcceptanceModel([chain, retrieval, hybrid])
    feed(model, chain, [60, 36, 22, 13], 30)
    feed(model, retrieval, [50, 25, 12, 6], 30)
    expected = sum(0.8**depth for depth in range(1, 5))
    known = model.estimates()
    assert known.mean_S[2] == pytest.approx(expected, rel=0.1)
    assert known.mean_S[2] > max(known.mean_S[0], known.mean_S[1])
    assert known.covariance_SS[2, 2] > max(known.covariance_SS[0, 0], known.covariance_SS[1, 1])


def test_depths_of_a_strategy_are_those_of_its_longer_part() -> None:
    """4_2_8+ngram_6 accepts up to 6 tokens."""
    (hybrid,) = parse("4_2_8+ngram_6")
    model = AcceptanceModel([hybrid])
    feed(model, hybrid, [99, 98, 97, 96, 95, 94], 60)
    assert model.estimates().mean_S[0] == pytest.approx(5.79, abs=0.1)


def test_acceptance_jump_is_seen_and_followed() -> None:
    model, chain = AcceptanceModel(ARMS), 1
    jumps = []
    for step in range(60):
        counts = [80, 64, 51, 41] if step < 50 else [10, 1, 0, 0]
        jumps.append(model.observe(ARMS[chain], 100, counts))
        model.fit(1)
    assert not any(jumps[20:50])
    assert any(jumps[50:53])
    assert model.estimates().mean_S[chain] < 0.2


def test_unusual_text_of_one_request_is_not_held_against_the_drafter() -> None:
    """64 requests show 0.8, the last of them 0.5 for 30 steps: that counts while it runs, and no longer."""
    model, (chain,) = AcceptanceModel(parse("4_1_4")), parse("4_1_4")
    for _ in range(40):
        model.observe(chain, 64, [51, 41, 33, 26])
        model.fit(1)
    usual = float(model.estimates().mean_S[0])
    for step in range(30):
        model.observe(chain, 1, [1, int(step % 2 == 0), 0, 0] if step % 2 == 0 else [0, 0, 0, 0])
        model.fit(1)
    last = float(model.estimates().mean_S[0])
    model.resize(64)
    new = float(model.estimates().mean_S[0])
    assert last < 0.7 * usual
    assert abs(math.log(new / usual)) < 0.5 * abs(math.log(last / usual))


def test_what_fits_the_estimates_is_no_news() -> None:
    chain = SpeculationStrategy.parse("2_1_2")
    model = AcceptanceModel([chain])
    for _ in range(40):
        model.observe(chain, 16, [8, 4])
        model.fit(1)
    for _ in range(5):
        model.observe(chain, 16, [8, 4])
        assert not model.has_news
    for _ in range(3):
        model.observe(chain, 16, [2, 0])
    assert model.has_news
    model.fit(8)
    assert not model.has_news


@pytest.mark.parametrize("accepted", [0, 64])
def test_thousands_of_equal_passes_keep_every_number_finite(accepted: int) -> None:
    """Passes that accept nothing made the means fall without end, and after a thousand of them to NaN."""
    strategies = parse("2_1_2", "6_1_6", "4_2_8", "4_1_4+ngram_4", "ngram_8")
    model = AcceptanceModel(strategies)
    for turn in range(3000):
        strategy = strategies[turn % len(strategies)]
        model.observe(strategy, 64, [accepted] * strategy.depth)
        model.fit(1)
    json.dumps(model.state_dict(), allow_nan=False)
    estimates = model.estimates()
    assert np.isfinite(estimates.mean_S).all()
    assert np.isfinite(estimates.covariance_SS).all()
