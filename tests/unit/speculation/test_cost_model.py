"""The cost-model selector on synthetic machines and drafters that change.

All scores are sums of expected values, and the noise is seeded, so nothing here depends on the speed of the machine.
"""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from tests.synthetic_decoding import (
    ARMS,
    RETRIEVING_ARMS,
    SyntheticDecoding,
    long_tail,
    long_tailed_lengths,
    run_rollout,
    run_selector,
)
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import AcceptanceTable, CostModelSelector
from tlt_megatron.speculation.pass_cost import PassCost

ROLLOUT = long_tail(64, scale=60)  # 64 requests, some 420 steps
LENGTHS = long_tailed_lengths(128)


@pytest.mark.parametrize("quality", [0.7, 0.9])
def test_long_tailed_rollouts_reach_97_percent_of_the_oracle(quality: float) -> None:
    """128 requests, 64 at once, each with a text of its own; the drafter has to catch up after every pause."""
    later = []
    for seed in range(2):
        world = SyntheticDecoding(seed=seed, quality=quality, catch_up_s=2e-5, slowdown=6.0)
        selector = CostModelSelector(ARMS)
        scores = [run_rollout(selector, world, LENGTHS, seed=n).of_oracle for n in range(4)]
        assert scores[0] > 0.95  # all is new
        later += scores[1:]
    assert sum(later) / len(later) > 0.97


def test_it_is_ahead_of_beg_mab() -> None:
    scores = []
    for selector in (CostModelSelector(ARMS), BegMabSelector([*ARMS, OFF])):
        world = SyntheticDecoding(seed=0, quality=0.85, catch_up_s=2e-5)
        run_rollout(selector, world, LENGTHS, seed=0)
        scores.append(run_rollout(selector, world, LENGTHS, seed=1).of_plain)
    assert scores[0] > 1.1 * scores[1]


@pytest.mark.parametrize("quality", [0.0, 0.03])
def test_useless_drafter_costs_at_most_two_percent(quality: float) -> None:
    """Three percent while everything is new. Looking at the drafter means that it catches up: that is paid for too."""
    for seed in range(2):
        world = SyntheticDecoding(seed=seed, quality=quality, catch_up_s=2e-5)
        selector = CostModelSelector(ARMS)
        assert run_rollout(selector, world, LENGTHS, seed=0).of_plain > 0.97
        assert run_rollout(selector, world, LENGTHS, seed=1).of_plain > 0.98


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("quality", [0.02, 0.4, 0.85])
def test_every_batch_size_is_as_fast_as_plain_or_faster(batch_size: int, quality: float) -> None:
    """Of the oracle: where plain decoding and a short chain are equals, a wrong choice between them is cheap."""
    scores = []
    for seed in range(1, 4):
        world, selector = SyntheticDecoding(seed=seed, quality=quality), CostModelSelector(ARMS)
        run_selector(selector, world, [batch_size] * 300)
        scores.append(run_selector(selector, world, [batch_size] * 400))
    assert min(score.of_plain for score in scores) > 0.98
    of_oracle = sum(score.of_oracle for score in scores) / len(scores)
    assert of_oracle > (0.97 if quality == 0.85 else 0.94)


def test_retrieval_is_used_where_the_learned_drafter_fails() -> None:
    world = SyntheticDecoding(seed=0, quality=0.03, retrieval=0.6, arms=RETRIEVING_ARMS)
    selector = CostModelSelector(RETRIEVING_ARMS)
    run_selector(selector, world, [4] * 300)
    score = run_selector(selector, world, [4] * 300)
    assert sum(s.num_retrieved > 0 and not s.is_learned for s in score.chosen) > 270
    assert score.of_oracle > 0.97


@pytest.mark.parametrize("batch_size", [1, 8])
def test_speculation_is_turned_off_when_the_drafter_goes_bad(batch_size: int) -> None:
    """Mostly within 40 steps, a single request being a poor witness, and what is lost in the meantime is small."""
    shares, of_plain = [], []
    for seed in range(8):
        world, selector = SyntheticDecoding(seed=seed, quality=0.85), CostModelSelector(ARMS)
        assert not run_selector(selector, world, [batch_size] * 300).chosen[-1].is_off
        world.quality = 0.02
        score = run_selector(selector, world, [batch_size] * 400)
        shares.append(score.chosen[40:].count(OFF) / 360)
        of_plain.append(score.of_plain)
    assert sum(shares) / len(shares) > (0.7 if batch_size == 1 else 0.95)
    assert sum(of_plain) / len(of_plain) > 0.955
    assert min(of_plain) > 0.94


@pytest.mark.parametrize("batch_size", [1, 8])
def test_speculation_is_turned_on_when_the_drafter_gets_good(batch_size: int) -> None:
    """Off for long: the next probe of the drafter comes within 200 passes, and then it stays on."""
    of_oracle = []
    for seed in range(8):
        world, selector = SyntheticDecoding(seed=seed, quality=0.02), CostModelSelector(ARMS)
        before = run_selector(selector, world, [batch_size] * 600)
        assert before.chosen.count(OFF) > 450
        assert before.of_plain > 0.97
        world.quality = 0.85
        score = run_selector(selector, world, [batch_size] * 600)
        assert score.chosen[200:].count(OFF) < 0.15 * 400
        of_oracle.append(run_selector(selector, world, [batch_size] * 300).of_oracle)
    assert min(of_oracle) > 0.85
    assert sum(of_oracle) / len(of_oracle) > 0.97


def test_a_bad_moment_does_not_end_speculation_for_long() -> None:
    """Six steps that accept next to nothing, as beginnings of responses may: given up, and taken up again."""
    for seed in range(4):
        world, selector = SyntheticDecoding(seed=seed, quality=0.85), CostModelSelector(ARMS)
        run_selector(selector, world, [32] * 300)
        world.quality = 0.02
        assert OFF in run_selector(selector, world, [32] * 6).chosen
        world.quality = 0.85
        assert run_selector(selector, world, [32] * 80).chosen.count(OFF) < 30


def test_a_last_request_that_accepts_nothing_is_soon_decoded_plainly() -> None:
    """After many that were worth a short chain, which costs two thirds of a plain step more: one witness alone must do."""

    class DearDrafts(SyntheticDecoding):
        def seconds(
            self, strategy: SpeculationStrategy, batch_size: int, num_unread: int = 0
        ) -> float:
            return {0: 1.0, 3: 1.65, 6: 2.3}[strategy.num_steps] * (0.004 + 0.0003 * batch_size)

    arms = [SpeculationStrategy.parse(text) for text in ("3_1_3", "6_1_6")]
    num_drafting = []
    for seed in range(8):
        world = DearDrafts(seed=seed, quality=0.55, arms=arms)
        selector = CostModelSelector(arms)
        for _ in range(3):
            run_selector(selector, world, [4] * 60 + [3] * 10 + [2] * 100)
        world.quality = 0.005
        chosen = run_selector(selector, world, [1] * 300).chosen
        num_drafting.append(len(chosen) - chosen.count(OFF))
    assert sum(num_drafting) / len(num_drafting) < 25


def test_a_new_batch_that_begins_badly_goes_on_drafting() -> None:
    for seed in range(4):
        world, selector = SyntheticDecoding(seed=seed, quality=0.85), CostModelSelector(ARMS)
        run_selector(selector, world, [32] * 300)
        run_selector(selector, world, [2] * 50)
        world.quality = 0.02
        run_selector(selector, world, [32] * 3)
        world.quality = 0.85
        assert run_selector(selector, world, [32] * 40).chosen.count(OFF) < 4


def test_a_bad_drafter_is_never_given_up_for_good() -> None:
    """Though what it would have to read grows with every step that it does not run, and with it the price of a probe."""
    for seed in range(8):
        world, selector = SyntheticDecoding(seed=seed, quality=0.02), CostModelSelector(ARMS)
        run_selector(selector, world, [8] * 300)
        chosen = run_selector(selector, world, [8] * 1200).chosen
        looks = [step for step, strategy in enumerate(chosen) if not strategy.is_off]
        gaps = [b - a for a, b in itertools.pairwise([0, *looks, len(chosen)])]
        assert max(gaps) <= 510


def test_it_goes_on_although_it_is_not_told_of_every_pass() -> None:
    """As in an engine that has no hook for some: nothing is learned of them, and the next look comes all the same."""
    world, selector = SyntheticDecoding(seed=0, quality=0.02), CostModelSelector(ARMS)
    run_selector(selector, world, [8] * 300)
    for _ in range(100):
        selector.choose(8)
    assert selector.state_dict()["num_observed"] == 300
    world.quality = 0.85
    assert run_selector(selector, world, [8] * 600).chosen.count(OFF) < 550


def test_the_best_arm_follows_the_quality_of_the_drafter() -> None:
    world, selector = SyntheticDecoding(seed=0), CostModelSelector(ARMS)

    def change(step: int) -> None:
        world.quality = (0.85, 0.45)[step // 300 % 2]

    assert run_selector(selector, world, [6] * 1800, change).of_oracle > 0.94


def test_arm_that_met_a_slow_moment_gets_another_chance() -> None:
    """Five times as slow whenever 6_1_6 runs within the first 60 steps, and the best arm by far from then on."""
    arms = ARMS[:3]
    world = SyntheticDecoding(seed=0, quality=0.95, arms=arms)
    assert world.best(1) == arms[2]
    selector = CostModelSelector(arms)
    for step in range(600):
        strategy = selector.choose(1).strategy
        accepted, seconds = world.step(strategy, 1)
        slow = 5.0 if step < 60 and strategy == arms[2] else 1.0
        counts = [int(accepted[0] >= depth) for depth in range(1, strategy.depth + 1)]
        first = world.first_by_depth(strategy, counts)
        selector.observe(strategy, 1, counts, seconds * slow, first)
    assert run_selector(selector, world, [1] * 100).chosen.count(arms[2]) > 85


@pytest.mark.parametrize(("chain_s", "least", "most"), [(0.0175, 4, 20), (0.004, 0, 1)])
def test_plain_decoding_is_looked_at_often_where_drafting_gains_little(
    chain_s: float, least: int, most: int
) -> None:
    """A chain is 1.1 or 4.8 times as fast as plain decoding: looks in 200 steps that cost a tenth of a step, or four."""
    chain = SpeculationStrategy.parse("4_1_4")
    selector, rng = CostModelSelector([chain]), random.Random(0)
    chosen = []
    for _ in range(400):
        strategy = selector.choose(16).strategy
        chosen.append(strategy)
        reached, counts = 16, []
        for _ in range(strategy.depth):
            reached = sum(rng.random() < 0.5 for _ in range(reached))
            counts.append(reached)
        selector.observe(strategy, 16, counts, 0.010 if strategy.is_off else chain_s)
    assert least <= chosen[200:].count(OFF) <= most


def test_speculation_goes_on_and_off_with_the_batch_size() -> None:
    world, selector = SyntheticDecoding(seed=0, quality=0.45), CostModelSelector(ARMS)
    assert world.best(64).is_off
    assert not world.best(4).is_off
    run_selector(selector, world, ROLLOUT)
    for sizes, is_off in (([64] * 200, True), ([4] * 200, False), ([64] * 200, True)):
        chosen = run_selector(selector, world, sizes).chosen[20:]
        assert sum(s.is_off == is_off for s in chosen) > 165


def test_hysteresis_holds_both_ways() -> None:
    """Hysteresis of 0.3: a gain of 14 % keeps speculation on, and equality does not turn it on."""
    chain = SpeculationStrategy.parse("4_1_4")
    world, selector = SyntheticDecoding(seed=0), CostModelSelector([chain], hysteresis=0.3)

    def share_on(log_gain: float) -> float:
        qualities = [step / 1000 for step in range(50, 1000)]
        for world.quality in qualities:
            if world.tokens_per_s(chain, 32) > math.exp(log_gain) * world.tokens_per_s(OFF, 32):
                break
        run_selector(selector, world, [32] * 300)
        score = run_selector(selector, world, [32] * 140)
        chosen = [s for s, r in zip(score.chosen, score.reasons, strict=True) if r == "best"]
        return sum(not strategy.is_off for strategy in chosen) / len(chosen)

    assert share_on(-0.5) < 0.1
    assert share_on(0.0) < 0.1
    assert share_on(0.5) > 0.9
    assert share_on(0.14) > 0.9
    assert share_on(-0.5) < 0.1


def test_trials_lose_no_more_than_their_share_of_the_time() -> None:
    """0.006 of the time, 2 plain steps to begin with, and what overdraws the budget: below 1.2 %."""
    world, selector = SyntheticDecoding(seed=0, quality=0.0), CostModelSelector(ARMS)
    score = run_selector(selector, world, [32] * 2000)
    total_s = lost_s = 0.0
    for strategy, reason in zip(score.chosen, score.reasons, strict=True):
        seconds = world.seconds(strategy, 32)
        total_s += seconds
        if reason == "probe":
            lost_s += seconds - world.seconds(OFF, 32)
    assert 0.0 < lost_s < 0.012 * total_s


@pytest.mark.parametrize(("batch_size", "most"), [(1, 10), (8, 3), (32, 3)])
def test_collapse_of_the_drafter_is_noticed_within_ten_passes(batch_size: int, most: int) -> None:
    """Drafting passes before two plain ones in a row, mean over six seeds. Nothing tells the selector."""
    counts = []
    for seed in range(6):
        world = SyntheticDecoding(seed=seed, quality=0.85, arms=ARMS[:3])
        selector = CostModelSelector(ARMS[:3])
        assert run_selector(selector, world, [batch_size] * 300).chosen[-10:].count(OFF) < 5
        world.quality = 0.0
        chosen = run_selector(selector, world, [batch_size] * 40).chosen
        end = next(i for i in range(39) if chosen[i].is_off and chosen[i + 1].is_off)
        counts.append(end - chosen[:end].count(OFF))
    assert sum(counts) / len(counts) <= most


@pytest.mark.parametrize("accepted", [0, 1])
def test_thousands_of_equal_passes_keep_every_number_finite(accepted: int) -> None:
    arms = [*ARMS, *RETRIEVING_ARMS]
    selector = CostModelSelector(list(dict.fromkeys(arms)))
    for step in range(3000):
        strategy = selector.choose(1).strategy if step % 3 else arms[step // 3 % len(arms)]
        counts = [accepted] * strategy.depth
        seconds = 0.010 if strategy.is_off else 0.015
        first = counts[: strategy.num_steps] if strategy.topk > 1 else None  # as the engine does
        selector.observe(strategy, 1, counts, seconds, first)
    numbers = json.dumps(selector.state_dict())
    assert "NaN" not in numbers
    assert "Infinity" not in numbers
    assert selector.choose(1).strategy.is_off == (accepted == 0)


def test_one_strategy_informs_the_acceptance_of_all() -> None:
    """Chains of 2 that accept 0.9 and 0.8 predict chains of 4; a tree is wider than a chain, retrieval is not known."""
    table = AcceptanceTable()
    unknown = table.tokens(RETRIEVING_ARMS[1])
    for _ in range(50):
        table.observe(ARMS[0], 100, [90, 72], None)
    assert table.tokens(ARMS[0]) == pytest.approx(1 + 0.9 + 0.72, abs=0.01)
    long = 1 + 0.9 + 0.72 + 0.72 * 0.8 + 0.72 * 0.64
    assert table.tokens(ARMS[1]) == pytest.approx(long, abs=0.02)
    assert table.tokens(ARMS[4]) > long + 0.2
    assert table.tokens(RETRIEVING_ARMS[1]) == unknown


def test_a_tree_tells_of_chains_and_learns_its_own_width() -> None:
    """The first candidate is right in 0.6 of the passes, the tree in 0.9: m ** w = 0.4 ** 2.5 = 0.1."""
    table, tree = AcceptanceTable(), SpeculationStrategy.parse("1_4_4")
    for _ in range(200):
        table.observe(tree, 100, [90], [60])
    assert table.tokens(SpeculationStrategy.parse("1_1_1")) == pytest.approx(1.6, abs=0.01)
    assert table.tokens(tree) == pytest.approx(1.9, abs=0.01)


def test_seconds_of_strategies_and_batch_sizes_never_run_are_predicted() -> None:
    world, cost = SyntheticDecoding(seed=0, slow_share=0.0), PassCost()
    for strategy in (OFF, *ARMS[:3]):
        for batch_size in (1, 4, 16, 64):
            for _ in range(9):
                cost.observe(strategy, batch_size, world.step(strategy, batch_size)[1])
    cost.refresh()
    for strategy in (OFF, *ARMS):
        for batch_size in (2, 8, 32, 64):
            expected = world.seconds(strategy, batch_size)
            assert cost.seconds(strategy, batch_size) == pytest.approx(expected, rel=0.2)


def test_a_disturbed_pass_hardly_moves_a_known_cost() -> None:
    cost = PassCost()
    for seconds in [0.01] * 5 + [1.0]:
        cost.observe(OFF, 4, seconds)
    cost.refresh()
    assert cost.seconds(OFF, 4) == pytest.approx(0.01, rel=0.1)


def test_choice_that_the_engine_overrules_does_no_harm() -> None:
    """An engine that has no drafter for now decodes plainly whatever is chosen, and learning goes on."""
    world, selector = SyntheticDecoding(seed=0, quality=0.85), CostModelSelector(ARMS)
    run_selector(selector, world, [4] * 100)
    for _ in range(200):
        selector.choose(4)
        selector.observe(OFF, 4, [], world.step(OFF, 4)[1])
    assert run_selector(selector, world, [4] * 100).of_oracle > 0.95
