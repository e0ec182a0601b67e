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
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

ROLLOUT = long_tail(64, scale=60)  # 64 requests, some 420 steps
LENGTHS = long_tailed_lengths(128)


@pytest.mark.parametrize("quality", [0.7, 0.9])
def test_long_tailed_rollouts_reach_97_percent_of_the_oracle(quality: float) -> None:
    """128 requests, 64 at once, each with a text of its own; the drafter has to catch up after every pause."""
    later = []
    for seed in range(2):
        world = SyntheticDecoding(seed=seed, quality=quality, catch_up_s=2e-5, hiccup=6.0)
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


def test_hybrids_are_used_where_both_drafters_are_good() -> None:
    world = SyntheticDecoding(seed=0, quality=0.7, retrieval=0.6, arms=RETRIEVING_ARMS)
    assert str(world.best(2)) == "4_1_4+ngram_4"
    selector = CostModelSelector(RETRIEVING_ARMS)
    run_selector(selector, world, [2] * 200)
    assert run_selector(selector, world, [2] * 300).chosen.count(world.best(2)) > 250


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
    """Off for long: the next look at the drafter comes within `probe_every` steps, and then it stays on."""
    of_oracle = []
    for seed in range(8):
        world, selector = SyntheticDecoding(seed=seed, quality=0.02), CostModelSelector(ARMS)
        assert run_selector(selector, world, [batch_size] * 600).chosen.count(OFF) > 500
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
    """Though what it would have to read grows with every step that it does not run, and with it the price of a look."""
    for seed in range(8):
        world, selector = SyntheticDecoding(seed=seed, quality=0.02), CostModelSelector(ARMS)
        run_selector(selector, world, [8] * 300)
        chosen = run_selector(selector, world, [8] * 1200).chosen
        looks = [step for step, strategy in enumerate(chosen) if not strategy.is_off]
        gaps = [b - a for a, b in itertools.pairwise([0, *looks, len(chosen)])]
        assert max(gaps) <= 510


def test_every_pass_has_a_decision_though_calm_ones_are_learned_from_together() -> None:
    world, selector = SyntheticDecoding(seed=0, quality=0.02), CostModelSelector(ARMS)
    run_selector(selector, world, [8] * 300)
    selector.decisions()
    chosen = run_selector(selector, world, [8] * 203 + [5] * 100).chosen
    decisions = selector.decisions()
    assert [decision.strategy for decision in decisions] == chosen
    assert all(decision.tokens_per_s is not None for decision in decisions)
    assert selector.state_dict()["num_observed"] == 603


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
        strategy = selector.choose(1)
        accepted, seconds = world.step(strategy, 1)
        slow = 5.0 if step < 60 and strategy == arms[2] else 1.0
        counts = [int(accepted[0] >= depth) for depth in range(1, strategy.depth + 1)]
        selector.observe(strategy, 1, counts, seconds * slow)
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
        strategy = selector.choose(16)
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
    """Hysteresis of 0.3 in the log of the throughput: a gain or loss of 15 % neither turns speculation on nor off."""
    chain = SpeculationStrategy.parse("4_1_4")
    world, selector = SyntheticDecoding(seed=0), CostModelSelector([chain], hysteresis=0.3)

    def share_on(log_gain: float) -> float:
        qualities = [step / 1000 for step in range(50, 1000)]
        for world.quality in qualities:
            if world.tokens_per_s(chain, 32) > math.exp(log_gain) * world.tokens_per_s(OFF, 32):
                break
        selector.decisions()
        run_selector(selector, world, [32] * 200)
        decisions = [d for d in selector.decisions()[60:] if d.reason == "exploit"]
        return sum(not d.strategy.is_off for d in decisions) / len(decisions)

    assert share_on(0.14) < 0.1
    assert share_on(0.5) > 0.9
    assert share_on(0.14) > 0.9
    assert share_on(-0.14) > 0.9
    assert share_on(-0.5) < 0.1


def test_trials_lose_no_more_than_their_share_of_the_time() -> None:
    """0.006 of the time, 2 plain steps to begin with, and what overdraws the budget: below 1.2 %."""
    world, selector = SyntheticDecoding(seed=0, quality=0.0), CostModelSelector(ARMS)
    run_selector(selector, world, [32] * 2000)
    total_s = lost_s = 0.0
    for decision in selector.decisions():
        seconds = world.seconds(decision.strategy, 32)
        total_s += seconds
        if decision.reason == "explore":
            lost_s += seconds - world.seconds(OFF, 32)
    assert 0.0 < lost_s < 0.012 * total_s


def test_choice_that_the_engine_overrules_does_no_harm() -> None:
    """An engine that has no drafter for now decodes plainly whatever is chosen, and learning goes on."""
    world, selector = SyntheticDecoding(seed=0, quality=0.85), CostModelSelector(ARMS)
    run_selector(selector, world, [4] * 100)
    for _ in range(200):
        selector.choose(4)
        selector.observe(OFF, 4, [], world.step(OFF, 4)[1])
    assert run_selector(selector, world, [4] * 100).of_oracle > 0.95


def test_state_round_trip_repeats_every_choice() -> None:
    world, selector = SyntheticDecoding(seed=0), CostModelSelector(ARMS)
    run_selector(selector, world, ROLLOUT)
    restored = CostModelSelector(ARMS)
    restored.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    for step, size in enumerate(ROLLOUT):
        world.quality = 0.8 if step < 200 else 0.3
        strategy = selector.choose(size)
        assert restored.choose(size) == strategy
        accepted, seconds = world.step(strategy, size)
        counts = [sum(a >= d for a in accepted) for d in range(1, strategy.depth + 1)]
        for each in (selector, restored):
            each.observe(strategy, size, counts, seconds)


def test_fresh_state_round_trip() -> None:
    restored = CostModelSelector(ARMS)
    restored.load_state_dict(json.loads(json.dumps(CostModelSelector(ARMS).state_dict())))
    assert restored.choose(3) is OFF


def test_without_arms_decoding_is_plain() -> None:
    selector = CostModelSelector([OFF])
    run_selector(selector, SyntheticDecoding(seed=0), [4] * 20)
    assert {decision.strategy for decision in selector.decisions()} == {OFF}


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="given twice"):
        CostModelSelector([ARMS[0], ARMS[0]])
    with pytest.raises(ValueError, match="explore_share=0"):
        CostModelSelector(ARMS, explore_share=0.0)
