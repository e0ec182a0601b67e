"""The cost-model selector on synthetic machines, drafters that change, and the two models it is made of.

All scores are sums of expected values, and the noise is seeded, so nothing here depends on the speed of the machine.
"""

from __future__ import annotations

import json
import math

import pytest

from tests.synthetic_decoding import ARMS, SyntheticDecoding, long_tail, run_selector
from tlt_megatron.speculation.acceptance_model import AcceptanceModel
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.step_cost import StepCostModel
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

ROLLOUT = long_tail(64, scale=60)  # 64 requests, some 420 steps


@pytest.mark.parametrize("quality", [0.0, 0.03])
def test_useless_drafter_costs_at_most_two_percent(quality: float) -> None:
    """Three percent while everything is new."""
    for seed in range(3):
        world, selector = SyntheticDecoding(seed=seed, quality=quality), CostModelSelector(ARMS)
        assert run_selector(selector, world, ROLLOUT).of_plain > 0.97
        assert run_selector(selector, world, ROLLOUT).of_plain > 0.98


@pytest.mark.parametrize("quality", [0.35, 0.6, 0.85])
def test_throughput_is_close_to_the_oracle(quality: float) -> None:
    """0.93 over the first rollout, when everything is new, and 0.96 from then on; six arms and OFF."""
    first, later = [], []
    for seed in range(4):
        world, selector = SyntheticDecoding(seed=seed, quality=quality), CostModelSelector(ARMS)
        first.append(run_selector(selector, world, ROLLOUT).of_oracle)
        later.append(run_selector(selector, world, ROLLOUT * 2).of_oracle)
    assert sum(first) / 4 > 0.93
    assert sum(later) / 4 > 0.96


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("quality", [0.02, 0.4, 0.85])
def test_every_batch_size_is_as_fast_as_plain_or_faster(batch_size: int, quality: float) -> None:
    world = SyntheticDecoding(seed=1, quality=quality)
    score = run_selector(CostModelSelector(ARMS), world, [batch_size] * 600)
    assert score.of_plain > 0.98
    assert score.of_oracle > 0.92


@pytest.mark.parametrize("batch_size", [1, 8])
def test_speculation_is_turned_off_when_the_drafter_goes_bad(batch_size: int) -> None:
    """Mostly within 40 steps, and what is lost in the meantime is small."""
    for seed in range(4):
        world, selector = SyntheticDecoding(seed=seed, quality=0.85), CostModelSelector(ARMS)
        assert not run_selector(selector, world, [batch_size] * 300).chosen[-1].is_off
        world.quality = 0.02
        score = run_selector(selector, world, [batch_size] * 400)
        assert score.chosen[40:].count(OFF) > 0.7 * 360
        assert score.of_plain > 0.95


@pytest.mark.parametrize("batch_size", [1, 8])
def test_speculation_is_turned_on_when_the_drafter_gets_good(batch_size: int) -> None:
    """Off for long: the next look at the drafter comes within `probe_every` steps, and then it stays on."""
    for seed in range(4):
        world, selector = SyntheticDecoding(seed=seed, quality=0.02), CostModelSelector(ARMS)
        assert run_selector(selector, world, [batch_size] * 600).chosen.count(OFF) > 500
        world.quality = 0.85
        score = run_selector(selector, world, [batch_size] * 600)
        assert score.chosen[200:].count(OFF) < 0.15 * 400
        assert run_selector(selector, world, [batch_size] * 300).of_oracle > 0.85


def test_the_best_arm_follows_the_quality_of_the_drafter() -> None:
    world, selector = SyntheticDecoding(seed=0), CostModelSelector(ARMS)

    def change(step: int) -> None:
        world.quality = (0.85, 0.45)[step // 300 % 2]

    assert run_selector(selector, world, [6] * 1800, change).of_oracle > 0.92


def test_speculation_goes_on_and_off_with_the_batch_size() -> None:
    world, selector = SyntheticDecoding(seed=0, quality=0.5), CostModelSelector(ARMS)
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
    """0.008 of the time, 2 plain steps to begin with, the looks in any case, and what overdraws the budget: below 2 %."""
    world, selector = SyntheticDecoding(seed=0, quality=0.0), CostModelSelector(ARMS)
    run_selector(selector, world, [32] * 2000)
    total_s = lost_s = 0.0
    for decision in selector.decisions():
        seconds = world.seconds(decision.strategy, 32)
        total_s += seconds
        if decision.reason == "explore":
            lost_s += seconds - world.seconds(OFF, 32)
    assert 0.0 < lost_s < 0.02 * total_s


def test_state_round_trip_repeats_every_choice() -> None:
    world, selector = SyntheticDecoding(seed=0), CostModelSelector(ARMS)
    run_selector(selector, world, ROLLOUT)
    restored = CostModelSelector(ARMS)
    restored.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    for step, size in enumerate(ROLLOUT):
        world.quality = 0.8 if step < 200 else 0.3
        strategy = selector.choose(size)
        assert restored.choose(size) == strategy
        counts, seconds = world.step(strategy, size)
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


def test_one_strategy_informs_the_acceptance_of_all() -> None:
    """Only a chain of 4 runs; a deeper chain and a tree are then estimated from it, with more doubt about the tree."""
    model, chain, deeper, tree = AcceptanceModel(ARMS), 1, 2, 4
    before = model.estimates()
    for _ in range(50):
        model.observe(ARMS[chain], 100, [30, 9, 3, 1])
        model.fit(1)
    after = model.estimates()
    assert after.means[chain] == pytest.approx(0.43, abs=0.03)
    assert after.means[deeper] == pytest.approx(0.43, abs=0.04)
    assert 0.5 < after.means[tree] < 1.3
    doubts = [after.covariance[arm][arm] for arm in (chain, deeper, tree)]
    assert doubts[0] < doubts[1] < doubts[2] < 0.5 * before.covariance[tree][tree]


def test_acceptance_jump_is_seen_and_followed() -> None:
    model, chain = AcceptanceModel(ARMS), 1
    jumps = []
    for step in range(60):
        counts = [80, 64, 51, 41] if step < 50 else [10, 1, 0, 0]
        jumps.append(model.observe(ARMS[chain], 100, counts))
        model.fit(1)
    assert not any(jumps[20:50])
    assert any(jumps[50:53])
    assert model.estimates().means[chain] < 0.2


def test_cost_law_predicts_strategies_and_batch_sizes_never_run() -> None:
    """Seconds that follow the law: five (strategy, batch size) pairs tell the rest."""

    def seconds(strategy: SpeculationStrategy, batch_size: int) -> float:
        rows, drafted = (
            batch_size * strategy.num_rows,
            strategy.num_steps * batch_size * strategy.topk,
        )
        return 0.02 + 2e-4 * rows + 1e-3 * strategy.num_steps + 5e-5 * drafted

    model = StepCostModel((OFF, *ARMS), half_life=400)
    seen = [(OFF, 60), (OFF, 8), (ARMS[0], 20), (ARMS[4], 10), (ARMS[2], 4)]
    for _ in range(10):
        for strategy, batch_size in seen:
            model.observe(strategy, batch_size, seconds(strategy, batch_size))
    model.fit()
    for strategy in (OFF, *ARMS):
        for batch_size in (1, 5, 30):
            expected = seconds(strategy, batch_size)
            assert model.estimate(strategy, batch_size).seconds == pytest.approx(expected, rel=0.12)
    known, unknown = model.estimate(ARMS[0], 20), model.estimate(ARMS[3], 20)
    assert known.log_error < 0.05 < unknown.log_error


def test_hiccup_of_the_machine_hardly_moves_a_known_cost() -> None:
    model = StepCostModel((OFF, *ARMS), half_life=400)
    for step in range(60):
        model.observe(OFF, 4, 0.010 if step != 40 else 1.0)
        model.fit()
    assert model.estimate(OFF, 4).seconds == pytest.approx(0.010, rel=0.03)
