"""The cost-model selector on synthetic machines, drafters that change, and the two models it is made of.

All scores are sums of expected values, and the noise is seeded, so nothing here depends on the speed of the machine.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tests.synthetic_decoding import ARMS, SyntheticDecoding, long_tail, run_selector
from tlt_megatron.speculation.acceptance_model import AcceptanceModel
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.step_cost import StepCostModel
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

ROLLOUT = long_tail(64, scale=60)  # 64 requests, some 420 steps


@pytest.mark.parametrize("quality", [0.0, 0.03])
def test_useless_drafter_costs_at_most_two_percent(quality: float) -> None:
    for seed in range(3):
        world = SyntheticDecoding(seed=seed, quality=quality)
        assert run_selector(CostModelSelector(ARMS), world, ROLLOUT).of_plain > 0.98


@pytest.mark.parametrize("quality", [0.35, 0.6, 0.85])
def test_throughput_is_close_to_the_oracle(quality: float) -> None:
    """0.93 over the first rollout, when everything is new, and 0.97 from then on."""
    for seed in range(3):
        world, selector = SyntheticDecoding(seed=seed, quality=quality), CostModelSelector(ARMS)
        assert run_selector(selector, world, ROLLOUT).of_oracle > 0.93
        assert run_selector(selector, world, ROLLOUT * 2).of_oracle > 0.97


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 16, 32, 64])
def test_every_batch_size_is_at_least_as_fast_as_plain(batch_size: int) -> None:
    for quality in (0.02, 0.4, 0.85):
        world = SyntheticDecoding(seed=1, quality=quality)
        score = run_selector(CostModelSelector(ARMS), world, [batch_size] * 600)
        assert score.of_plain > 0.98
        assert score.of_oracle > 0.95


@pytest.mark.parametrize("batch_size", [1, 8])
def test_speculation_is_turned_off_when_the_drafter_goes_bad(batch_size: int) -> None:
    """Within 40 steps, and what is lost in the meantime is small."""
    world, selector = SyntheticDecoding(seed=0, quality=0.85), CostModelSelector(ARMS)
    assert not run_selector(selector, world, [batch_size] * 300).chosen[-1].is_off
    world.quality = 0.02
    score = run_selector(selector, world, [batch_size] * 400)
    assert score.chosen[40:].count(OFF) > 340
    assert score.of_plain > 0.97


@pytest.mark.parametrize("batch_size", [1, 8])
def test_speculation_is_turned_on_when_the_drafter_gets_good(batch_size: int) -> None:
    """Off for long: the next look at the drafter comes within `probe_every` steps, and then it stays on."""
    world, selector = SyntheticDecoding(seed=0, quality=0.02), CostModelSelector(ARMS)
    assert run_selector(selector, world, [batch_size] * 600).chosen.count(OFF) > 560
    world.quality = 0.85
    score = run_selector(selector, world, [batch_size] * 600)
    assert score.chosen[200:].count(OFF) < 20
    tail = run_selector(selector, world, [batch_size] * 200)
    assert tail.of_oracle > 0.97


def test_the_best_arm_follows_the_quality_of_the_drafter() -> None:
    world, selector = SyntheticDecoding(seed=0), CostModelSelector(ARMS)

    def change(step: int) -> None:
        world.quality = (0.85, 0.45)[step // 300 % 2]

    assert run_selector(selector, world, [6] * 1800, change).of_oracle > 0.95


def test_speculation_goes_on_and_off_with_the_batch_size() -> None:
    world, selector = SyntheticDecoding(seed=0, quality=0.5), CostModelSelector(ARMS)
    assert world.best(64).is_off
    assert not world.best(4).is_off
    run_selector(selector, world, ROLLOUT)
    for sizes, is_off in (([64] * 200, True), ([4] * 200, False), ([64] * 200, True)):
        chosen = run_selector(selector, world, sizes).chosen[20:]
        assert sum(s.is_off == is_off for s in chosen) > 165


def test_hysteresis_prevents_flapping_where_it_makes_no_difference() -> None:
    """A chain that costs what it brings, to 1 %: few flips in 1,000 steps."""
    chain = SpeculationStrategy.parse("1_1_1")
    world, selector = SyntheticDecoding(seed=0), CostModelSelector([chain])
    world.quality = world.seconds(chain, 8) / world.seconds(OFF, 8) - 1.0 + 0.005
    run_selector(selector, world, [8] * 100)
    run_selector(selector, world, [8] * 1000)
    exploiting = [d.strategy for d in selector.decisions() if d.reason == "exploit"]
    assert len(exploiting) > 500
    assert sum(a != b for a, b in pairwise(exploiting)) <= 12


def test_trials_lose_no_more_than_their_share_of_the_time() -> None:
    """0.01 of the time, 3 plain steps to begin with, and one step that overdraws the budget; expected values against
    measured ones: 1.5 covers the noise."""
    world, selector = SyntheticDecoding(seed=0, quality=0.0), CostModelSelector(ARMS)
    run_selector(selector, world, [32] * 2000)
    total_s = lost_s = 0.0
    for decision in selector.decisions():
        seconds = world.seconds(decision.strategy, 32)
        total_s += seconds
        if decision.reason == "explore":
            lost_s += seconds - world.seconds(OFF, 32)
    assert 0.0 < lost_s < 1.5 * (0.01 * total_s + 4 * world.seconds(OFF, 32))


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
