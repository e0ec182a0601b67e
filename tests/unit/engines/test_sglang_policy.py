"""Our selectors as SGLang's adaptive policy, without SGLang."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tlt_megatron.engines.sglang.adaptive_policy import PolicyFactory, SelectorPolicy, write_config
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.speculation.strategy import SpeculationStrategy

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
    ) -> None:
        assert seconds > 0
        self.seen.append((str(strategy), batch_size, list(accepted_by_depth)))


def make_policy(selector: FixedSelector, agree=lambda steps: steps) -> SelectorPolicy:
    return SelectorPolicy(selector, [SpeculationStrategy.parse("2_1_2"), CHAIN], agree)


def test_results_are_observed_with_the_strategy_of_their_own_step() -> None:
    selector = NotingSelector()
    policy = make_policy(selector)
    assert policy.candidate_steps == [0, 2, 4]
    # With overlap scheduling the next step is chosen before the last one's result is known.
    assert policy.get_steps_for_batch(3) == 4
    policy.is_off = True
    assert policy.get_steps_for_batch(3) == 0
    policy.is_off = False
    assert policy.on_verify_complete([0, 2, 4], 3) is None
    assert policy.on_verify_complete([0, 0, 0], 3) is None
    assert selector.seen == [("4_1_4", 3, [2, 2, 1, 1]), ("off", 3, [])]
    passes = policy.take_passes()
    assert [record.strategy for record in passes] == ["4_1_4", "off"]
    assert [record.num_committed for record in passes] == [9, 3]
    assert [record.reason for record in passes] == ["fixed", "suspended"]
    assert passes[0].start_s + passes[0].seconds <= passes[1].start_s + passes[1].seconds
    assert policy.take_passes() == []


def test_while_it_is_off_nothing_is_learned() -> None:
    selector = NotingSelector()
    policy = make_policy(selector)
    policy.is_off = True
    assert policy.get_steps_for_batch(2) == 0
    policy.on_verify_complete([0, 0], 2)
    assert selector.seen == []


def test_a_result_without_a_step_is_ignored() -> None:
    selector = NotingSelector()
    make_policy(selector).on_verify_complete([1], 1)
    assert selector.seen == []


def test_the_ranks_follow_the_first_one() -> None:
    policy = make_policy(NotingSelector(), agree=lambda steps: 2)
    assert policy.get_steps_for_batch(1) == 2
    policy.on_verify_complete([2], 1)
    assert policy.take_passes()[0].strategy == "2_1_2"


def test_the_file_makes_our_policy_and_another_file_sglangs(tmp_path: Path) -> None:
    factory = PolicyFactory(lambda **settings: ("upstream", settings))
    path = tmp_path / "policy.json"
    write_config(path, [CHAIN], "cost_model", [])
    assert json.loads(path.read_text())["1"]["candidate_steps"] == [0, 4]
    policy = factory.make(initial_steps=4, cfg_path=str(path))
    assert policy is factory.policy
    assert policy.candidate_steps == [0, 4]
    foreign = tmp_path / "foreign.json"
    foreign.write_text('{"1": {"candidate_steps": [1]}}')
    for other in (str(foreign), None):
        made = factory.make(initial_steps=3, cfg_path=other)
        assert made == ("upstream", {"initial_steps": 3, "cfg_path": other})
