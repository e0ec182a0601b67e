"""Dynamic sampling and overlong punishment by hand."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.policy_batches import make_rollout, score
from tlt_megatron.config.load import load_config
from tlt_megatron.rollout.batch_rules import BatchRules
from tlt_megatron.types import FinishReason, ScoredGroup


def group(
    draw: int, *rewards: float, lengths: tuple[int, ...] = (), acc: tuple[float, ...] = ()
) -> ScoredGroup:
    rollouts = [
        make_rollout((1,), torch.zeros(length, dtype=torch.int64), (draw, i))
        for i, length in enumerate(lengths or [1] * len(rewards))
    ]
    details = tuple({"acc": value} for value in acc) or tuple({} for _ in rewards)
    return dataclasses.replace(score(rollouts, rewards), details=details)


def draws(groups: list[ScoredGroup]) -> list[int]:
    return [g.prompt.draw_index for g in groups]


FLAT = [group(0, 1, 1), group(1, 0, 0), group(2, 0, 0), group(3, 1, 1)]


def test_extra_rounds_are_as_large_as_the_share_of_kept_groups_asks() -> None:
    rules = BatchRules(num_prompts=4, max_rounds=3, metric="reward")
    assert rules.num_missing(FLAT) == 4  # none kept: a whole round
    assert rules.num_missing([*FLAT[:2], group(2, 0, 1), group(3, 1, 0)]) == 4  # 2 / (2 of 4)
    assert rules.num_missing([FLAT[0], *(group(i, 0, 1) for i in (1, 2, 3))]) == 2  # 1 / (3/4)
    assert rules.is_complete([group(i, 0, 1) for i in range(4)], 1)
    assert rules.is_complete(FLAT * 3, 3)  # the bound


def test_the_batch_is_the_first_kept_groups_in_the_order_of_the_draws() -> None:
    rules = BatchRules(num_prompts=3, max_rounds=4, metric="reward")
    groups = [FLAT[0], group(1, 0, 1), FLAT[2], *(group(i, 0.5, 0) for i in (3, 4, 5))]
    assert draws(rules.select(groups)) == [1, 3, 4]
    assert rules.metrics(groups, 2) == {
        "train/num_gen_batches": 2,
        "rollout/extra_draws": 3,
        "rollout/kept_group_share": 4 / 6,
        "rollout/filler_groups": 0,
    }


def test_at_the_bound_the_first_dropped_groups_fill_the_batch() -> None:
    rules = BatchRules(num_prompts=3, max_rounds=2, metric="reward")
    groups = [*FLAT, group(4, 0, 1), group(5, 2, 2)]
    assert draws(rules.select(groups)) == [0, 1, 4]
    assert rules.metrics(groups, 2)["rollout/filler_groups"] == 2


def test_with_one_round_the_batch_is_still_the_kept_groups() -> None:
    """Partial rollouts have more complete groups than a batch needs."""
    rules = BatchRules(num_prompts=2, max_rounds=1, metric="reward", round_tokens=8)
    groups = [*FLAT[:2], group(2, 0, 1), group(3, 1, 0)]
    assert rules.is_complete(groups, 1)
    batch = rules.select(groups)
    assert draws(batch) == [2, 3]
    assert rules.carry(groups, batch) == []
    assert rules.metrics(groups, 1)["rollout/kept_group_share"] == 0.5


def test_without_dynamic_sampling_nothing_is_dropped() -> None:
    rules = BatchRules(num_prompts=4)
    assert rules.is_complete(FLAT, 1)
    assert draws(rules.select(FLAT)) == [0, 1, 2, 3]
    assert rules.metrics(FLAT, 1) == {}
    assert rules.punish_overlong(FLAT[0]) is FLAT[0]


def open_group(draw: int) -> ScoredGroup:
    """Its second response has not ended."""
    whole = group(draw, 1, 0)
    first, second = whole.rollouts
    rollouts = first, dataclasses.replace(second, finish_reason=FinishReason.CUT)
    return dataclasses.replace(whole, rollouts=rollouts)


def test_partial_rollouts_carry_open_groups_and_complete_ones_beyond_the_batch() -> None:
    rules = BatchRules(num_prompts=2, round_tokens=8, num_drawn=5)
    groups = [open_group(0), FLAT[1], FLAT[2], FLAT[3], open_group(4)]
    complete = [each for each in groups if each.is_complete]
    assert not rules.is_complete(complete[:1], 7)
    assert rules.num_missing(complete[:1]) == 1
    assert rules.num_missing([]) == 0  # nothing has ended: another round without further prompts
    assert rules.is_complete(complete, 1)
    batch = rules.select(complete)
    assert draws(batch) == [1, 2]
    carried = rules.carry(groups, batch)
    assert draws(carried) == [0, 3, 4]
    assert rules.num_first(carried) == 4  # one group waits complete
    assert BatchRules(num_prompts=2).carry(groups, batch) == []


def test_a_resume_with_other_settings_takes_no_group_that_they_do_not_allow() -> None:
    whole, cut = group(0, 1, 0, lengths=(3, 8)), open_group(1)
    for limit, fitting in ((7, [1]), (8, [0, 1]), (1, [])):
        rules = BatchRules(num_prompts=2, round_tokens=1, max_new_tokens=limit)
        assert draws(rules.still_fit([whole, cut], num_samples=2)) == fitting
        assert rules.still_fit([whole, cut], num_samples=3) == []
    # without partial rollouts, and so perhaps without a correction
    rules = BatchRules(num_prompts=2, max_new_tokens=8)
    assert rules.still_fit([whole, cut], num_samples=2) == []


def test_dynamic_sampling_carries_no_complete_group_that_it_drops() -> None:
    rules = BatchRules(num_prompts=1, max_rounds=2, metric="reward", round_tokens=8)
    groups = [FLAT[0], group(1, 0, 1), open_group(2), FLAT[3], group(4, 1, 0)]
    complete = [each for each in groups if each.is_complete]
    batch = rules.select(complete)
    assert draws(batch) == [1]
    assert draws(rules.carry(groups, batch)) == [2, 4]
    assert not rules.is_complete([], 2)  # the bound on rounds needs a batch


def test_another_metric_decides_and_a_wrong_name_is_refused() -> None:
    groups = [group(0, 0, 1, acc=(1, 1)), group(1, 1, 1, acc=(0, 1))]
    rules = BatchRules(num_prompts=1, max_rounds=2, metric="acc")
    assert draws(rules.select(groups)) == [1]
    rules = BatchRules(num_prompts=1, max_rounds=2, metric="accuracy")
    expected = "algorithm.filter_groups='accuracy': must be score, reward or a further number"
    with pytest.raises(ValueError, match=re.escape(expected) + r".*\['acc'\]"):
        rules.select(groups)


def test_the_score_decides_unless_the_punished_reward_is_named() -> None:
    groups = [group(0, 1, 1, lengths=(5, 18)), group(1, 0, 1, lengths=(18, 5))]
    limits = {"max_new_tokens": 20, "overlong_tokens": 4}
    for metric, expected in (("score", [1]), ("reward", [0, 1])):
        rules = BatchRules(num_prompts=1, max_rounds=2, metric=metric, **limits)
        assert draws(rules.kept(groups)) == expected
        assert rules.select(groups)[0].rewards == ((-0.5, 1) if metric == "score" else (1, 0.5))


@pytest.mark.parametrize(
    ("functions", "metric"),
    [
        ("reward.function=mine.py:style", "anything"),
        ("reward.function={'math':0.5,'mine.py:style':0.5}", "math"),
        ("reward.function={'math':0.5,'mine.py:style':0.5}", "style/length"),
        ("reward.function={'math':0.7,'exact':0.3}", "acc"),
        ("reward.function={'math':0.7,'exact':0.3}", "exact"),
    ],
)
def test_a_metric_that_results_may_have_is_taken(functions: str, metric: str) -> None:
    load_config(None, [f"algorithm.filter_groups={metric}", functions])


def test_a_round_in_which_all_scoring_failed_keeps_no_group() -> None:
    """With reward.on_error=zero a failed response has reward 0 and no further numbers, whatever the
    metric.
    """
    rules = BatchRules(
        num_prompts=1, max_rounds=2, metric="acc", max_new_tokens=20, overlong_tokens=4
    )
    failed = [group(i, 0, 0, lengths=(5, 18)) for i in range(2)]
    assert not rules.is_complete(failed, 1)
    assert draws(rules.select(failed)) == [0]


def test_soft_overlong_punishment_by_hand() -> None:
    """Equation 13 of DAPO with L_max 20 and L_cache 4: 0 up to 16 tokens, then -1/4 for each token,
    times the penalty.
    """
    rules = BatchRules(num_prompts=1, max_new_tokens=20, overlong_tokens=4, overlong_penalty=2.0)
    punished = rules.punish_overlong(group(0, 1, 1, 1, 0, lengths=(5, 16, 17, 20)))
    assert punished.rewards == (1.0, 1.0, 0.5, -2.0)
    assert [d["overlong_reward"] for d in punished.details] == [0.0, 0.0, -0.5, -2.0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algorithm.filter_groups=score rollout.num_samples=1 algorithm.advantage=reinforce_plus_plus",
            "algorithm.filter_groups='score': must be none where rollout.num_samples=1",
        ),
        ("algorithm.filter_groups=", "algorithm.filter_groups='': must be a name"),
        (
            "algorithm.filter_groups=accuracy",
            "algorithm.filter_groups='accuracy': must be one of none, score, reward, acc, or a further number of math",
        ),
        (
            "algorithm.filter_groups=maths reward.function={'math':0.5,'mine.py:style':0.5}",
            "algorithm.filter_groups='maths': must be one of none, score, reward, or a further number of math, mine.py:style",
        ),
        (
            "reward.overlong_tokens=512",
            "reward.overlong_tokens=512: must be < rollout.max_new_tokens=512",
        ),
        (
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.enable: here algorithm.filter_groups (here none for off)",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(None, override.split())
