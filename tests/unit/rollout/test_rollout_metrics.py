"""Metrics of a batch by hand, and weights that differ between ranks are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.rollout_stand_ins import make_prompts, make_rollout
from tlt_megatron.rollout.batch_rules import BatchRules, right_responses, scores
from tlt_megatron.rollout.evaluation import (
    Evaluator,
    by_data_source,
    final_answer,
    majority,
    pass_at_k,
)
from tlt_megatron.rollout.rollout_metrics import rollout_metrics, token_sums
from tlt_megatron.rollout.rollout_worker import Collected
from tlt_megatron.runtime.process_groups import SINGLE, group_of
from tlt_megatron.trainer.weight_sync import push_policy
from tlt_megatron.types import (
    FinishReason,
    KeptTokens,
    SamplingParams,
    ScoredGroup,
    Transcript,
)


def scored(
    lengths: tuple[int, ...], rewards: tuple[float, ...], limit: int, data_source: str = ""
) -> ScoredGroup:
    (prompt,) = make_prompts([0], data_source)
    rollouts = [make_rollout(prompt, (0,) * length, g) for g, length in enumerate(lengths)]
    rollouts = [
        replace(r, finish_reason=FinishReason.LENGTH) if length == limit else r
        for r, length in zip(rollouts, lengths, strict=True)
    ]
    return ScoredGroup(prompt=prompt, rollouts=tuple(rollouts), rewards=rewards)


def sums_of(*groups: ScoredGroup) -> list[dict[str, float]]:
    """The sums of two ranks, of which the second has all tokens."""
    return [token_sums(()), token_sums(groups)]


def test_rollout_metrics_by_hand() -> None:
    groups = [scored((2, 4), (1.0, 1.0), 8), scored((6, 8), (0.0, -0.5), 8)]
    metrics = rollout_metrics(groups, sums_of(*groups), max_prompt_tokens=2)
    assert metrics["critic/rewards/mean"] == pytest.approx(0.375)
    assert (metrics["critic/rewards/max"], metrics["critic/rewards/min"]) == (1.0, -0.5)
    assert metrics["response_length/mean"] == 5
    assert metrics["response_length/clip_ratio"] == 0.25
    assert (metrics["prompt_length/max"], metrics["prompt_length/min"]) == (2, 2)
    assert metrics["prompt_length/clip_ratio"] == 1.0
    assert rollout_metrics(groups, sums_of(*groups), 3)["prompt_length/clip_ratio"] == 0.0
    assert metrics["rollout/num_tokens"] == 20 + 4 * 2
    assert metrics["rollout/entropy"] == 0.5
    assert (metrics["rollout/solve_all"], metrics["rollout/solve_none"]) == (0.5, 0.5)


def test_right_is_a_score_and_not_the_punished_reward() -> None:
    group = scored((2, 4), (1 - 2e-16, 0.25), 8)
    group = replace(group, punishments=(0.0, -0.5))
    for right_score, share in ((0.75, 1.0), (1.0, 0.0)):
        metrics = rollout_metrics([group], sums_of(group), 2, right_score)
        assert metrics["rollout/solve_all"] == share
    assert right_responses(group, 1.0) == [True, False]
    unlucky = replace(group, rewards=(-1.0, 0.0), punishments=(-2.0, 0.0))
    assert rollout_metrics([unlucky], sums_of(unlucky), 2)["rollout/solve_none"] == 0


@pytest.mark.parametrize("name", ["overlong_reward", "score", "reward", "accuracy", "rewards"])
def test_a_further_number_of_any_name_changes_no_score(name: str) -> None:
    """verl's managers return overlong_reward themselves, within the score."""
    group = replace(scored((2, 4), (0.0, 1.0), 8), details=({name: -1.0}, {name: -1.0}))
    assert right_responses(group, 1.0) == [False, True]
    rules = BatchRules(num_prompts=1, max_new_tokens=4, overlong_tokens=2)
    punished = rules.punish_overlong(group)
    assert (punished.rewards, scores(punished)) == ((0.0, 0.0), [0.0, 1.0])
    metrics = rollout_metrics([punished], sums_of(punished), 8)
    assert metrics[f"reward/unknown/{name}/mean"] == -1.0


def test_metrics_of_kept_sets_by_hand() -> None:
    """3, 1 and 2 tokens were kept; the fourth set was too large to be recorded."""
    group = scored((4,), (1.0,), 8)
    counts = torch.tensor([3, 1, 0, 2], dtype=torch.int32)
    kept = KeptTokens(token_ids=torch.arange(6, dtype=torch.int32), counts=counts)
    rollouts = (replace(group.rollouts[0], kept=kept),)
    group = replace(group, rollouts=rollouts)
    metrics = rollout_metrics([group], sums_of(group), 8)
    assert (metrics["rollout/kept_set_size"], metrics["rollout/kept_set_missing_share"]) == (
        2,
        0.25,
    )


def test_accept_lengths_by_position_by_hand() -> None:
    """Two passes from 8 to 15, one from 16 on, on one of two ranks."""
    group = scored((12,), (1.0,), 8)
    passes = ((9, 4), (13, 1), (16, 6))
    group = replace(group, rollouts=(replace(group.rollouts[0], passes=passes),))
    metrics = rollout_metrics([group], sums_of(group), 8)
    by_position = {
        name.removeprefix("spec/accept_length_by_position/"): value
        for name, value in metrics.items()
        if name.startswith("spec/")
    }
    assert by_position == {"8": 2.5, "16": 6.0}


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k([0, 1, 4], 4) == pytest.approx(
        {"eval/pass@1": 5 / 12, "eval/pass@2": 0.5, "eval/pass@4": 2 / 3}
    )
    assert list(pass_at_k([3], 6)) == ["eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/pass@6"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3 + 4 = 7", "7"),
        ("7 is wrong: \\boxed{\\frac{1}{2}}, not 0.7", "\\frac{1}{2}"),
        ("\\boxed{5} and \\boxed{6", "5"),
        ("\\boxed{5} and \\boxed{}", "5"),
        ("#### 1,234.", "1234"),
        ("I think\nblue. \n", "blue"),
        ("", ""),
    ],
)
def test_the_answer_of_a_response(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_majority_by_hand() -> None:
    answers = [["1", "2", "2", "3"], ["4", "5", "6", "7"], ["8", "8", "9", "9"]]
    right = [[True, False, False, False], [True, False, False, False], [False, True, False, True]]
    # 2 is wrong; of four answers once each the first, 4, is right; 8 is right in one of its two
    # responses
    assert list(map(majority, answers, right)) == [0, 1, 0.5]


def test_the_vote_of_a_conversation_is_its_last_turn() -> None:
    """Two conversations answer 5, and then 7. The third response, which answers 57, is right."""
    group = scored((2, 2, 1), (0.0, 0.0, 1.0), 8)
    texts = [("user", "x"), ("assistant", "#### 5"), ("user", "6?"), ("assistant", "7")]
    messages = tuple({"role": role, "content": content} for role, content in texts)
    talk = Transcript(messages=messages, num_turns=2, has_failed=False)
    talks = [replace(rollout, transcript=talk) for rollout in group.rollouts[:2]]
    last = replace(group.rollouts[2], token_ids=torch.tensor([57]))
    group = replace(group, rollouts=(*talks, last))

    class Worker:
        replicas = SINGLE

        def collect(self, *_: object) -> Collected:
            return Collected(groups=(group,), metrics={}, passes=[])

        def decode(self, token_ids: Sequence[int]) -> str:
            return " ".join(map(str, token_ids))

    params = SamplingParams(num_samples=3, max_new_tokens=8)
    data_sets = {"test": [group.prompt]}
    metrics = Evaluator(worker=Worker(), data_sets=data_sets, params=params).evaluate(0)
    assert (metrics["eval/maj@3"], metrics["eval/pass@3"]) == (0, 1)


def test_rewards_and_further_numbers_of_reward_functions_by_data_source() -> None:
    groups = [
        replace(scored((1, 1), (0.0, 1.0), 8, "gsm8k"), details=({"acc": 0.5}, {"acc": 1.5})),
        replace(scored((1, 1), (0.0, 0.0), 8, "gsm8k"), details=({"acc": 4.0, "tool": 2.0}, {})),
        replace(scored((1, 1), (1.0, 0.5), 8), details=({"acc": 7.0}, {"acc": 9.0})),
    ]
    metrics = rollout_metrics(groups, sums_of(*groups), 8)
    assert (metrics["reward/gsm8k/acc/mean"], metrics["reward/gsm8k/tool/mean"]) == (1.5, 0.5)
    assert metrics["reward/unknown/acc/mean"] == 8.0
    assert (
        by_data_source(groups).items()
        >= {
            "val-core/gsm8k/reward/mean@2": 0.25,
            "val-core/gsm8k/reward/best@2/mean": 0.5,
            "val-core/unknown/reward/mean@2": 0.75,
            "val-core/unknown/reward/best@2/mean": 1.0,
            "val-aux/gsm8k/acc/mean@2": 1.5,
            "val-aux/gsm8k/acc/best@2/mean": 2.75,
            "val-aux/unknown/acc/best@2/mean": 9.0,
        }.items()
    )


def test_ranks_that_are_sent_other_weights_are_named() -> None:
    class Engine:
        def load_weights(self, tensors, *, version, checksum) -> None:
            dict(tensors)

    class Model:
        def export_hf_weights(self):
            yield "w", torch.full((3,), float(dist.get_rank() == 1))

    def push() -> str:
        world = group_of(dist.group.WORLD)
        with pytest.raises(RuntimeError) as raised:
            push_policy(Model(), Engine(), 7, dtype=torch.float32, world=world)
        return str(raised.value)

    for message in run_ranks(3, push):
        assert message == "policy version 7: ranks [1] were sent other weights than rank 0"


def test_a_number_that_only_right_responses_return_is_0_for_the_others() -> None:
    group = scored((2, 4), (1.0, 0.0), 8)
    groups = [replace(group, details=({"acc": 1.0}, {})), replace(group, rewards=(0.0, 0.0))]
    metrics = rollout_metrics(groups, sums_of(*groups), 8)
    assert metrics["reward/unknown/acc/mean"] == metrics["critic/rewards/mean"] == 0.25


def test_names_of_sources_and_numbers_that_would_be_one_stay_two() -> None:
    group = scored((2, 4), (1.0, 0.0), 8)
    one, two = (
        replace(
            group,
            prompt=replace(group.prompt, data_source=source),
            details=({name: value, "x": value},) * 2,
        )
        for source, name, value in (("math", "algebra/acc", 1.0), ("math/algebra", "acc", 3.0))
    )
    metrics = rollout_metrics([one, two], sums_of(one, two), 8)
    assert metrics["reward/math//algebra/acc/mean"] == 1.0
    assert metrics["reward/math/algebra//acc/mean"] == 3.0
    assert metrics["reward/math/algebra/x/mean"] == 3.0
