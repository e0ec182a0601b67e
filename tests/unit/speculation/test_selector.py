"""States of selectors: what is restored, and which states are refused."""

from __future__ import annotations

import json

import pytest

from tests.synthetic_decoding import ARMS, SyntheticDecoding, run_selector
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector, make_selector
from tlt_megatron.speculation.verify import accepted_by_depth

CHAIN = SpeculationStrategy.parse("2_1_2")
TREE = SpeculationStrategy.parse("3_4_8")


def make_selectors() -> list[StrategySelector]:
    return [
        FixedSelector(CHAIN),
        BegMabSelector([TREE, CHAIN, OFF]),
        CostModelSelector([CHAIN, TREE]),
    ]


def test_a_restored_selector_repeats_every_choice() -> None:
    rollout = [size for size in (64, 32, 16, 8, 4, 2, 1) for _ in range(60)]
    for make in (
        lambda seed: CostModelSelector(ARMS),
        lambda seed: BegMabSelector([*ARMS, OFF], epsilon=0.3, window=20, seed=seed),
    ):
        world, selector, restored = SyntheticDecoding(seed=0), make(9), make(0)
        run_selector(selector, world, rollout)
        restored.load_state_dict(json.loads(json.dumps(selector.state_dict())))
        for step, size in enumerate(rollout):
            world.quality = 0.8 if step < 200 else 0.3
            decision = selector.choose(size)
            assert restored.choose(size) == decision
            strategy = decision.strategy
            accepted, seconds = world.step(strategy, size)
            counts = accepted_by_depth(accepted, strategy.depth)
            for each in (selector, restored):
                each.observe(strategy, size, counts, seconds, counts[: strategy.num_steps])
        assert restored.state_dict() == selector.state_dict()


@pytest.mark.parametrize("index", range(3))
def test_state_of_another_selector_is_ignored_with_a_warning(
    index: int, caplog: pytest.LogCaptureFixture
) -> None:
    selectors = make_selectors()
    state = json.loads(json.dumps(selectors[index].state_dict()))
    selectors[index].load_state_dict(state)
    assert not caplog.records
    for other in selectors[:index] + selectors[index + 1 :]:
        if isinstance(other, FixedSelector):
            continue  # it has nothing to restore
        fresh = other.state_dict()
        caplog.clear()
        other.load_state_dict(state)
        assert "the selector starts anew" in caplog.text
        assert other.state_dict() == fresh


def test_state_of_other_strategies_starts_anew_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    selector = CostModelSelector([CHAIN])
    for _ in range(4):
        selector.observe(CHAIN, 4, [4, 4], 0.01)
    other = CostModelSelector([TREE])
    other.load_state_dict(selector.state_dict())
    assert "['off', '2_1_2'], this run has ['off', '3_4_8']" in caplog.text
    assert other.state_dict() == CostModelSelector([TREE]).state_dict()


@pytest.mark.parametrize("index", [1, 2])
def test_steps_of_unlisted_strategies_are_ignored(index: int) -> None:
    selector = make_selectors()[index]
    before = selector.state_dict()
    selector.observe(SpeculationStrategy.parse("5_1_5"), 4, [4, 4, 4, 4, 4], 0.1)
    assert selector.state_dict() == before


@pytest.mark.parametrize("name", ["cost_model", "beg_mab"])
def test_a_strategy_that_is_given_twice_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"strategies={TREE}, {TREE}: one is given twice"):
        make_selector(name, [TREE, TREE], max_batch_size=8)
