"""The cost-model selector on synthetic machines and drafters that change.

All scores are sums of expected values, and the noise is seeded, so nothing here depends on the
speed of the machine.
"""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest

from tests.synthetic_decoding import (
    ARMS,
    RETRIEVING_ARMS,
    SyntheticDecoding,
    long_tailed_lengths,
    run_rollout,
    run_selector,
)
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.verify import accepted_by_depth

LENGTHS = long_tailed_lengths(128)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CHAIN = SpeculationStrategy.parse("4_1_4")


def after(
    num_steps: int, batch_size: int, quality: float, *, seed: int = 0
) -> tuple[SyntheticDecoding, CostModelSelector]:
    """A world and a selector that has seen `num_steps` passes of it."""
    world, selector = SyntheticDecoding(seed=seed, quality=quality), CostModelSelector(ARMS)
    run_selector(selector, world, [batch_size] * num_steps)
    return world, selector


@pytest.mark.parametrize("quality", [0.7, 0.9])
def test_long_tailed_rollouts_are_close_to_the_oracle_and_ahead_of_beg_mab(quality: float) -> None:
    """128 requests, 64 at once, each with a text of its own; the drafter has to catch up after
    every pause.
    """
    later = []
    for seed in range(2):
        world = SyntheticDecoding(seed=seed, quality=quality, catch_up_s=2e-5, slowdown=6.0)
        selector = CostModelSelector(ARMS)
        scores = [run_rollout(selector, world, LENGTHS, seed=n).of_oracle for n in range(3)]
        assert scores[0] > 0.93  # all is new
        later += scores[1:]
    assert fmean(later) > 0.95
    bandit = BegMabSelector([*ARMS, OFF])
    theirs = [run_rollout(bandit, world, LENGTHS, seed=n).of_oracle for n in range(2)]
    assert fmean(later) > 1.1 * theirs[1]


@pytest.mark.parametrize("quality", [0.0, 0.03])
def test_a_useless_drafter_costs_at_most_three_percent(quality: float) -> None:
    """A probe of the drafter includes reading all tokens that it missed, and the three percent
    include that too.
    """
    for seed in range(2):
        world = SyntheticDecoding(seed=seed, quality=quality, catch_up_s=2e-5)
        selector = CostModelSelector(ARMS)
        for number in range(2):
            assert run_rollout(selector, world, LENGTHS, seed=number).of_plain > 0.97


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("quality", [0.02, 0.4, 0.85])
def test_every_batch_size_is_as_fast_as_plain_or_faster(batch_size: int, quality: float) -> None:
    scores = []
    for seed in range(1, 4):
        world, selector = after(300, batch_size, quality, seed=seed)
        scores.append(run_selector(selector, world, [batch_size] * 400))
    assert min(score.of_plain for score in scores) > 0.97
    assert fmean(score.of_oracle for score in scores) > 0.93


@pytest.mark.parametrize(("batch_size", "num_passes"), [(1, 100), (8, 35), (32, 15)])
def test_a_drafter_that_goes_bad_is_left_and_taken_up_again_when_it_is_good(
    batch_size: int, num_passes: int
) -> None:
    """Nothing tells the selector. A probe of the drafter comes within 500 passes."""
    for seed in range(4):
        world, selector = after(300, batch_size, 0.85, seed=seed)
        world.quality = 0.0
        score = run_selector(selector, world, [batch_size] * 400)
        assert score.chosen[num_passes:].count(OFF) > 0.8 * (400 - num_passes)
        assert score.of_plain > 0.92
        world.quality = 0.85
        run_selector(selector, world, [batch_size] * 600)
        assert run_selector(selector, world, [batch_size] * 300).of_oracle > 0.9


def test_a_bad_drafter_is_never_given_up_for_good() -> None:
    """What it has not read grows with every step that it does not run, and so does the price of a
    probe.
    """
    for seed in range(4):
        world, selector = after(300, 8, 0.02, seed=seed)
        chosen = run_selector(selector, world, [8] * 1200).chosen
        probes = [step for step, strategy in enumerate(chosen) if not strategy.is_off]
        gaps = [b - a for a, b in itertools.pairwise([0, *probes, len(chosen)])]
        assert max(gaps) <= 510


def test_a_strategy_that_met_a_slow_moment_gets_another_chance() -> None:
    """6_1_6 is five times as slow within the first 60 steps, and the best by far from then on."""
    arms = ARMS[:3]
    world = SyntheticDecoding(seed=0, quality=0.95, arms=arms)
    assert world.best(1) == arms[2]
    selector = CostModelSelector(arms)
    for step in range(600):
        strategy = selector.choose(1).strategy
        accepted, seconds = world.step(strategy, 1)
        slow = 5.0 if step < 60 and strategy == arms[2] else 1.0
        selector.observe(strategy, 1, accepted_by_depth(accepted, strategy.depth), seconds * slow)
    assert run_selector(selector, world, [1] * 100).chosen.count(arms[2]) > 85


def decode(selector: CostModelSelector, num_steps: int, *, num_accepted: int) -> list[bool]:
    """Whether each step drafted. A plain step takes 1 ms, a drafting one 2 ms."""
    drafted = []
    for _ in range(num_steps):
        strategy = selector.choose(4).strategy
        drafted.append(not strategy.is_off)
        depths = [4 * (depth < num_accepted) for depth in range(strategy.depth)]
        selector.observe(strategy, 4, depths, 0.001 if strategy.is_off else 0.002)
    return drafted


def test_a_new_drafter_is_not_judged_by_its_first_pass() -> None:
    """The first pass reads the prompts, so it is slow, and drafts the beginnings of responses,
    which are hard. Each training brings a new drafter, so one of them is soon found to be good.
    """
    selector = CostModelSelector([CHAIN])
    decode(selector, 1200, num_accepted=0)
    for _ in range(3):
        while any(decode(selector, 10, num_accepted=0)):
            pass
        selector.observe(CHAIN, 4, [0, 0, 0, 0], 0.040)
        for _ in range(6):
            selector.drafter_changed()
            drafted = decode(selector, 60, num_accepted=4)
        assert all(drafted[-10:])


class ComputeBoundDecoding(SyntheticDecoding):
    """A CPU with a small policy: a pass costs in proportion to its rows, so nothing beats plain
    decoding by more than 2 %. Measured with the quickstart's policy.
    """

    def seconds(self, strategy: SpeculationStrategy, batch_size: int, num_unread: int = 0) -> float:
        seconds = 3.3e-4 + 7.5e-5 * batch_size * strategy.num_rows
        if not strategy.is_off:
            seconds += 5e-4 + strategy.num_steps * (4e-5 + 1.8e-5 * batch_size)
        return seconds + (1e-5 * num_unread if strategy.is_learned else 0.0)


@pytest.mark.parametrize(("quality", "share"), [(0.05, 0.95), (0.55, 0.94), (0.9, 0.95)])
def test_steps_that_do_not_need_a_drafter_hardly_pay_for_it(quality: float, share: float) -> None:
    """Each step has few passes and begins with a new drafter, as while one learns."""
    scores = []
    for seed in range(4):
        chains = [SpeculationStrategy.parse(text) for text in ("2_1_2", "4_1_4", "8_1_8")]
        world = ComputeBoundDecoding(seed=seed, quality=quality, arms=chains)
        selector = CostModelSelector(chains)
        for number in range(30):
            selector.drafter_changed()
            lengths = long_tailed_lengths(32, seed=number)
            scores.append(run_rollout(selector, world, lengths, seed=number).of_plain)
    assert fmean(scores) > share


def test_a_straggler_does_not_keep_new_requests_from_drafting() -> None:
    """The last request of a batch accepts nothing and is decoded plainly. The next batch is drafted
    at once.
    """
    for seed in range(4):
        world, selector = SyntheticDecoding(seed=seed, quality=0.85), CostModelSelector(ARMS)
        run_selector(selector, world, [8] * 300)
        world.quality = 0.0
        assert run_selector(selector, world, [1] * 300).chosen[200:].count(OFF) > 60
        world.quality = 0.85
        assert run_selector(selector, world, [8] * 12).chosen.count(OFF) <= 3  # probes


def test_retrieval_goes_on_while_learned_drafts_find_no_memory() -> None:
    """A probe that the engine overrules waits for its next turn, also the first one of a new
    drafter.
    """
    world = SyntheticDecoding(seed=0, quality=0.03, retrieval=0.6, arms=RETRIEVING_ARMS)
    selector = CostModelSelector(RETRIEVING_ARMS)
    run_selector(selector, world, [4] * 300)
    selector.drafter_changed()
    chosen = []
    for _ in range(200):
        strategy = selector.choose(4).strategy
        strategy = OFF if strategy.is_learned else strategy
        accepted, seconds = world.step(strategy, 4)
        selector.observe(strategy, 4, accepted_by_depth(accepted, strategy.depth), seconds)
        chosen.append(strategy)
    assert sum(s.num_retrieved > 0 for s in chosen) > 180
