"""Our selectors as SGLang's adaptive policy, without SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.sglang.adaptive_policy import (
    AdaptiveHooks,
    SelectorPolicy,
    write_config,
)
from tlt_megatron.speculation.selector import FixedSelector

CHAIN = SpeculationStrategy.parse("4_1_4")


class NotingSelector(FixedSelector):
    """Remembers what it observed."""

    def __init__(self) -> None:
        super().__init__(CHAIN)
        self.seen: list[tuple[str, int, list[int]]] = []

    def observe(
        self, strategy, batch_size, accepted_by_depth, seconds, first_by_depth=None
    ) -> None:
        assert seconds > 0
        self.seen.append((str(strategy), batch_size, list(accepted_by_depth)))


def make_policy(selector: FixedSelector, agree=lambda steps: steps) -> SelectorPolicy:
    return SelectorPolicy(selector, [SpeculationStrategy.parse("2_1_2"), CHAIN], agree)


def make_hooks() -> tuple[AdaptiveHooks, NotingSelector]:
    hooks, selector = AdaptiveHooks(lambda **settings: None), NotingSelector()
    hooks.policy = make_policy(selector)
    return hooks, selector


def launch(hooks: AdaptiveHooks, *, is_off: bool = False, is_prefill: bool = False) -> object:
    """The result of a pass that SGLang's worker launches for three requests."""
    assert hooks.policy is not None
    hooks.policy.is_off = is_off

    def forward() -> SimpleNamespace:
        if not is_prefill:
            hooks.policy.get_steps_for_batch(3)
        return SimpleNamespace()

    return hooks.launch(forward)


def resolve(hooks: AdaptiveHooks, result: object, correct: list[int]) -> None:
    """The scheduler processes a result."""
    result.num_correct_drafts_per_req_cpu = correct
    hooks.resolve([], None, result, None)


def test_results_are_observed_with_the_strategy_of_their_own_step() -> None:
    hooks, selector = make_hooks()
    policy = hooks.policy
    assert policy.candidate_steps == [0, 2, 4]
    # With overlap scheduling the next step is chosen before the last one's result is known.
    first = launch(hooks)
    launch(hooks)  # SGLang drops this pass, as its requests were aborted
    prefill = launch(hooks, is_prefill=True)
    last = launch(hooks, is_off=True)
    policy.is_off = False
    resolve(hooks, first, [0, 2, 4])
    resolve(hooks, prefill, [0, 0, 0])
    resolve(hooks, last, [0, 0, 0])
    assert selector.seen == [("4_1_4", 3, [2, 2, 1, 1]), ("off", 3, [])]
    passes = policy.take_passes()
    assert [record.strategy for record in passes] == ["4_1_4", "off"]
    assert [record.num_committed for record in passes] == [9, 3]
    assert [record.reason for record in passes] == ["fixed", "paused"]
    assert passes[0].start_s + passes[0].seconds <= passes[1].start_s + passes[1].seconds
    assert policy.take_passes() == []


def test_while_it_is_off_nothing_is_learned() -> None:
    hooks, selector = make_hooks()
    resolve(hooks, launch(hooks, is_off=True), [0, 0, 0])
    assert selector.seen == []


def test_the_ranks_follow_the_first_one() -> None:
    policy = make_policy(NotingSelector(), agree=lambda steps: 2)
    assert policy.get_steps_for_batch(1) == 2
    assert str(policy.take_chosen().strategy) == "2_1_2"


def test_the_file_makes_our_policy_and_another_file_sglangs(tmp_path: Path) -> None:
    factory = AdaptiveHooks(lambda **settings: ("upstream", settings))
    path = tmp_path / "policy.json"
    write_config(path, [CHAIN], "cost_model", max_batch_size=64)
    assert json.loads(path.read_text())["1"]["candidate_steps"] == [0, 4]
    policy = factory.make(initial_steps=4, cfg_path=str(path))
    assert policy is factory.policy
    assert policy.candidate_steps == [0, 4]
    foreign = tmp_path / "foreign.json"
    foreign.write_text('{"1": {"candidate_steps": [1]}}')
    for other in (str(foreign), None):
        made = factory.make(initial_steps=3, cfg_path=other)
        assert made == ("upstream", {"initial_steps": 3, "cfg_path": other})


def test_buckets_of_beg_mab_follow_the_largest_batch(tmp_path: Path) -> None:
    """Two budgets: the second bucket starts at the square root of the largest batch, 3 of 9 and 8
    of 64.
    """
    chains = [SpeculationStrategy.parse("2_1_2"), CHAIN]
    for max_batch_size, at_three in ((9, 2), (64, 4)):
        path = tmp_path / f"{max_batch_size}.json"
        write_config(path, chains, "beg_mab", max_batch_size=max_batch_size)
        factory = AdaptiveHooks(lambda **settings: settings)
        policy = factory.make(initial_steps=4, cfg_path=str(path))
        assert policy.selector.choose(3).strategy.num_steps == at_three
