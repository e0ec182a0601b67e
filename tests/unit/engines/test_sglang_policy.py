"""Our selectors as SGLang's adaptive policy, without SGLang."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

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
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
        first_by_depth: Sequence[int] | None = None,
    ) -> None:
        assert seconds > 0
        self.seen.append((str(strategy), batch_size, list(accepted_by_depth)))


def make_policy(selector: FixedSelector, agree=lambda steps: steps) -> SelectorPolicy:
    return SelectorPolicy(selector, [SpeculationStrategy.parse("2_1_2"), CHAIN], agree)


IDS = ("a", "b", "c")


def launch(policy: SelectorPolicy, ids: Sequence[str] = IDS) -> object:
    """Choose a step and launch its pass, as SGLang's worker does; what the pass's result carries."""
    policy.get_steps_for_batch(len(ids))
    return policy.launched(ids)


def finish(
    policy: SelectorPolicy, step: object, correct: list[int], ids: Sequence[str] = IDS
) -> None:
    """The result of a pass, as SGLang's scheduler processes it."""
    policy.expect(step, ids)
    assert policy.on_verify_complete(correct, len(ids)) is None


def test_results_are_observed_with_the_strategy_of_their_own_step() -> None:
    selector = NotingSelector()
    policy = make_policy(selector)
    assert policy.candidate_steps == [0, 2, 4]
    # With overlap scheduling the next step is chosen before the last one's result is known.
    assert policy.get_steps_for_batch(3) == 4
    first = policy.launched(IDS)
    policy.is_off = True
    assert policy.get_steps_for_batch(3) == 0
    second = policy.launched(IDS)
    policy.is_off = False
    finish(policy, first, [0, 2, 4])
    finish(policy, second, [0, 0, 0])
    assert selector.seen == [("4_1_4", 3, [2, 2, 1, 1]), ("off", 3, [])]
    passes = policy.take_passes()
    assert [record.strategy for record in passes] == ["4_1_4", "off"]
    assert [record.num_committed for record in passes] == [9, 3]
    assert [record.reason for record in passes] == ["fixed", "paused"]
    assert passes[0].start_s + passes[0].seconds <= passes[1].start_s + passes[1].seconds
    assert policy.take_passes() == []


def test_a_step_whose_result_never_comes_does_not_shift_the_others() -> None:
    selector = NotingSelector()
    policy = make_policy(selector)
    launch(policy, ("x",))  # SGLang drops this pass, as its requests were aborted
    policy.is_off = True
    second = launch(policy)
    policy.is_off = False
    finish(policy, second, [0, 0, 0])
    assert [record.strategy for record in policy.take_passes()] == ["off"]
    assert selector.seen == [("off", 3, [])]


def test_a_result_of_other_requests_than_its_step_is_an_error() -> None:
    policy = make_policy(NotingSelector())
    number = launch(policy)
    with pytest.raises(RuntimeError, match=r"step 1 was for requests \['a', 'b', 'c'\].*'b'"):
        policy.expect(number, ("b", "a", "c"))
    number = launch(policy)
    policy.expect(number, IDS)
    with pytest.raises(RuntimeError, match=r"step 2 was for 3 requests: its result is of 2"):
        policy.on_verify_complete([1, 1], 2)


def test_while_it_is_off_nothing_is_learned() -> None:
    selector = NotingSelector()
    policy = make_policy(selector)
    policy.is_off = True
    finish(policy, launch(policy, ("a", "b")), [0, 0], ("a", "b"))
    assert selector.seen == []


def test_a_result_without_a_step_is_ignored() -> None:
    selector = NotingSelector()
    policy = make_policy(selector)
    assert policy.launched(("a",)) is None  # a prefill pass chooses nothing
    finish(policy, None, [1], ("a",))
    assert selector.seen == []
    assert policy.take_passes() == []


def test_hooks_carry_a_step_on_its_result() -> None:
    hooks = AdaptiveHooks(lambda **settings: None)
    hooks.policy = policy = make_policy(NotingSelector())
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid=rid) for rid in IDS])

    def forward(worker: object, batch: SimpleNamespace) -> SimpleNamespace:
        policy.get_steps_for_batch(len(batch.reqs))
        return SimpleNamespace()

    def resolve(processor: object, result: object, batch: SimpleNamespace) -> str:
        policy.on_verify_complete([4, 4, 4], len(batch.reqs))
        return "tokens"

    results = [hooks.launch(forward, None, batch) for _ in range(2)]
    # Matched by number: the first result is lost on the way.
    assert hooks.resolve(resolve, None, results[1], batch) == "tokens"
    assert len(policy.take_passes()) == 1
    hooks.resolve(resolve, None, results[0], batch)
    assert policy.take_passes() == []


def test_the_ranks_follow_the_first_one() -> None:
    policy = make_policy(NotingSelector(), agree=lambda steps: 2)
    assert policy.get_steps_for_batch(1) == 2
    finish(policy, policy.launched(("a",)), [2], ("a",))
    assert policy.take_passes()[0].strategy == "2_1_2"


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
    """Two budgets: the second bucket starts at the square root of the largest batch, 3 of 9 and 8 of 64."""
    chains = [SpeculationStrategy.parse("2_1_2"), CHAIN]
    for max_batch_size, at_three in ((9, 2), (64, 4)):
        path = tmp_path / f"{max_batch_size}.json"
        write_config(path, chains, "beg_mab", max_batch_size=max_batch_size)
        factory = AdaptiveHooks(lambda **settings: settings)
        policy = factory.make(initial_steps=4, cfg_path=str(path))
        assert policy.selector.choose(3).strategy.num_steps == at_three
