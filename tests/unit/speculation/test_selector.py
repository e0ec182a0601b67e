"""The fixed selector, the trace of decisions, and states that do not fit."""

from __future__ import annotations

import json

import pytest

from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import DecisionTrace, FixedSelector, StrategySelector
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

CHAIN = SpeculationStrategy.parse("2_1_2")
TREE = SpeculationStrategy.parse("3_4_8")


def make_selectors() -> list[StrategySelector]:
    return [
        FixedSelector(CHAIN),
        BegMabSelector([TREE, CHAIN, OFF], (1, 4, 9)),
        CostModelSelector([CHAIN, TREE]),
    ]


def test_fixed_selector_keeps_its_strategy() -> None:
    selector = FixedSelector(CHAIN)
    assert [selector.choose(n) for n in (1, 8, 64)] == [CHAIN] * 3


@pytest.mark.parametrize("index", range(3))
def test_decisions_tell_what_was_chosen_and_what_it_brought(index: int) -> None:
    selector = make_selectors()[index]
    strategy = selector.choose(2)
    selector.observe(strategy, 2, [2, 1][: strategy.num_steps], 0.5)
    selector.choose(3)
    first, second = selector.decisions()
    assert (first.batch_size, first.strategy) == (2, strategy)
    accepted = 0 if strategy.is_off else 3
    assert first.tokens_per_s == pytest.approx((2 + accepted) / 0.5)
    assert (second.batch_size, second.tokens_per_s) == (3, None)
    assert selector.decisions() == []


def test_trace_keeps_the_latest_and_ignores_steps_of_others() -> None:
    trace = DecisionTrace(capacity=2)
    for size in (1, 2, 3):
        trace.chosen(size, CHAIN, "only")
    trace.observed(TREE, 3, 1.0)
    trace.observed(CHAIN, 2, 1.0)
    trace.observed(CHAIN, 3, 5.0)
    assert [(d.batch_size, d.tokens_per_s) for d in trace.take()] == [(2, None), (3, 5.0)]


@pytest.mark.parametrize("index", range(3))
def test_state_of_another_selector_is_refused(index: int) -> None:
    selectors = make_selectors()
    state = json.loads(json.dumps(selectors[index].state_dict()))
    selectors[index].load_state_dict(state)
    for other in selectors[:index] + selectors[index + 1 :]:
        with pytest.raises(ValueError, match="but the state is of selector="):
            other.load_state_dict(state)


def test_state_of_other_strategies_is_refused() -> None:
    state = CostModelSelector([CHAIN]).state_dict()
    with pytest.raises(ValueError, match="strategies=off, 3_4_8, but the state is of"):
        CostModelSelector([TREE]).load_state_dict(state)


@pytest.mark.parametrize("index", [1, 2])
def test_steps_of_unlisted_strategies_are_ignored(index: int) -> None:
    selector = make_selectors()[index]
    before = selector.state_dict()
    selector.observe(SpeculationStrategy.parse("5_1_5"), 4, [4, 4, 4, 4, 4], 0.1)
    assert selector.state_dict() == before
