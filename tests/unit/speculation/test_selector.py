"""The fixed selector, and states that do not fit."""

from __future__ import annotations

import json

import pytest

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector

CHAIN = SpeculationStrategy.parse("2_1_2")
TREE = SpeculationStrategy.parse("3_4_8")


def make_selectors() -> list[StrategySelector]:
    return [
        FixedSelector(CHAIN),
        BegMabSelector([TREE, CHAIN, OFF]),
        CostModelSelector([CHAIN, TREE]),
    ]


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
