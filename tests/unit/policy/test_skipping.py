"""Which responses the update computes, and that the gradient does not depend on it, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.no_shortcuts import WithLogprobPass, WithoutSkipping
from tests.policy_batches import data_parallel_groups, make_trainer
from tests.ranks import run_ranks
from tests.unit.policy.test_policy_trainer import FakeModel, lengths_of, scored_batch
from tlt_megatron.config.extensions import REGISTRY
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.health import TrainingHealth, UnhealthyTrainingError
from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.types import FinishReason, ScoredGroup

REWARDS = ((1.0, 0.0, 0.0), (1.0,) * 3, (0.0,) * 3, (0.0, 2.0, 0.0), (0.5,) * 3)


class FakeTap:
    """Takes the two longest sequences of a pass."""

    def choose(self, lengths: Sequence[int], groups: ProcessGroups) -> list[int]:
        return sorted(range(len(lengths)), key=lambda i: -lengths[i])[:2]


def scored_with(rewards: Sequence[tuple[float, ...]] = REWARDS) -> list[ScoredGroup]:
    """Five prompts, three responses each, of 5 to 15 tokens with the prompt."""
    return [
        dataclasses.replace(scored, rewards=each)
        for scored, each in zip(scored_batch(), rewards, strict=True)
    ]


def _train(
    section: AlgorithmSection,
    scored: Sequence[ScoredGroup] | None = None,
    *,
    groups: ProcessGroups | None = None,
    tap: FakeTap | None = None,
    **settings: Any,
) -> tuple[FakeModel, dict[str, float]]:
    model = FakeModel(groups)
    trainer = make_trainer(model, section, groups, **settings)
    inference = trainer.infer_logprobs(trainer.plan(scored or scored_with()), tap)
    return model, inference.metrics | trainer.update(inference, tap)


def updated(model: FakeModel) -> list[list[int]]:
    """The lengths of the sequences of each update."""
    return [lengths_of(update) for update in model.updates]


def _train_on_ranks(section: AlgorithmSection) -> list[tuple[list[Tensor], list[list[int]], dict]]:
    def on_rank() -> tuple[list[Tensor], list[list[int]], dict[str, float]]:
        model, metrics = _train(section, groups=data_parallel_groups())
        return model.gradients, updated(model), metrics

    return run_ranks(2, on_rank)


@pytest.mark.parametrize(
    "section",
    [
        AlgorithmSection(tis_cap=2.0),
        AlgorithmSection(clip_low=0.01, clip_high=0.01, num_minibatches=2, num_epochs=2),
        AlgorithmSection(loss="gspo", aggregation="sequence_mean", num_epochs=2),
        AlgorithmSection(loss="cispo", clip_low=1.0, aggregation="sequence_sum", num_epochs=2),
    ],
    ids=("ppo", "ppo_clipped", "gspo", "cispo"),
)
def test_the_gradient_is_the_same(section: AlgorithmSection) -> None:
    all_computed = WithoutSkipping(**dataclasses.asdict(section))
    expected, expected_metrics = _train(all_computed)
    for gradients, lengths, metrics in _train_on_ranks(section):
        assert len(gradients) == section.num_minibatches * section.num_epochs
        for mine, theirs in zip(gradients, expected.gradients, strict=True):
            assert (mine - theirs).abs().max() < 1e-12
            assert theirs.abs().max() > 1e-4
        assert all(1 <= len(update) <= 4 for update in lengths)
        assert metrics["actor/pg_loss"] == pytest.approx(expected_metrics["actor/pg_loss"])
        assert metrics["actor/skipped_response_share"] == pytest.approx(9 / 15)
    assert [len(update) for update in updated(expected)] in ([15], [6, 9, 6, 9], [15, 15])


@pytest.mark.parametrize(
    ("section", "num_computed"),
    [
        (AlgorithmSection(), 6),
        (AlgorithmSection(advantage="dr_grpo"), 6),
        (AlgorithmSection(advantage="reinforce_plus_plus"), 15),
        (AlgorithmSection(entropy_coef=0.01), 15),
        (AlgorithmSection(kl_coef=0.1), 15),
        (AlgorithmSection(kl_coef=0.1, kl_placement="reward"), 15),
        (WithoutSkipping(), 15),
    ],
    ids=str,
)
def test_only_responses_without_any_gradient_are_skipped(
    section: AlgorithmSection, num_computed: int
) -> None:
    model, _ = _train(section)
    assert [len(update) for update in updated(model)] == [num_computed]


@pytest.mark.parametrize(
    ("loss", "aggregation", "entropy_coef"),
    [
        ("ppo", "token_mean", 0.0),
        ("ppo", "sequence_sum", 0.1),
        ("gspo", "sequence_mean", 0.1),
        ("cispo", "sequence_mean", 0.0),
    ],
)
def test_a_masked_response_has_no_part_in_the_gradient(
    tmp_path: Path, loss: str, aggregation: str, entropy_coef: float
) -> None:
    """With an advantage of each response alone, the gradient is that of the other responses."""
    (tmp_path / "mine.py").write_text(
        "def raw(rewards):\n    return [[(r.sum() - 0.3).expand_as(r).float() for r in g] for g in rewards]\n"
    )
    own = {"loss": loss, "aggregation": aggregation, "entropy_coef": entropy_coef, "num_epochs": 2}
    masked = AlgorithmSection(advantage=f"{tmp_path}/mine.py:raw", mask_truncated=True, **own)
    cut, rest = [], []
    for each in scored_with():
        first, *others = each.rollouts
        first = dataclasses.replace(first, finish_reason=FinishReason.LENGTH)
        cut.append(dataclasses.replace(each, rollouts=(first, *others)))
        rest.append(dataclasses.replace(each, rollouts=tuple(others), rewards=each.rewards[1:]))
    (found, _), (expected, _) = _train(masked, cut), _train(masked, rest)
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert (mine - theirs).abs().max() < 1e-12
        assert theirs.abs().max() > 1e-4


def test_a_users_loss_is_given_every_response(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def loss(logprobs, old_logprobs, batch, section):\n    return -logprobs, batch.loss_mask\n"
    )
    model, metrics = _train(AlgorithmSection(loss=f"{tmp_path}/mine.py:loss"))
    assert [len(update) for update in updated(model)] == [15]
    assert metrics["actor/skipped_response_share"] == 0


def test_without_any_advantage_the_first_response_to_each_prompt_is_computed() -> None:
    equal = scored_with(((1.0,) * 3,) * 5)
    section = AlgorithmSection(num_minibatches=2)
    model, metrics = _train(section, equal)
    assert [len(update) for update in updated(model)] == [2, 3]
    assert [gradient.abs().max() for gradient in model.gradients] == [0, 0]
    assert metrics["actor/entropy"] > 0
    assert metrics["actor/num_updates"] == 2


def test_without_any_advantage_engines_that_differ_still_stop_the_run() -> None:
    health = TrainingHealth(max_diff=None, dtypes=("float32", "float32"))
    with pytest.raises(UnhealthyTrainingError, match="compute different policies"):
        _train(AlgorithmSection(), scored_with(((0.0,) * 3,) * 5), health=health)


def test_a_tap_is_given_the_longest_responses_with_and_without_a_gradient() -> None:
    """The longest two are of 15 and 14 tokens: one has no gradient and takes a pass of its own."""
    tap = FakeTap()
    model, _ = _train(AlgorithmSection(), tap=tap)
    assert model.passes == [(False, 1, tap)]
    model, _ = _train(WithLogprobPass(), tap=tap)
    assert model.passes == [(False, 15, tap)]
    model, _ = _train(AlgorithmSection())
    assert model.passes == []


def test_ranks_whose_advantages_differ_compute_the_same_responses(tmp_path: Path) -> None:
    """As on machines that round differently. Else the ranks would run different micro-batches."""
    (tmp_path / "mine.py").write_text(
        "import torch.distributed as dist\n"
        "def by_rank(rewards):\n"
        "    return [[reward * (i != dist.get_rank()) for reward in group] "
        "for i, group in enumerate(rewards)]\n"
    )
    results = _train_on_ranks(AlgorithmSection(advantage=f"{tmp_path}/mine.py:by_rank"))
    lengths = sorted(n for _, ((update),), _ in results for n in update)
    # Rank 0 gives its own group, 0, no advantage.
    assert lengths == sorted(
        rollout.num_tokens
        for i, group in enumerate(scored_with())
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
        if reward and i != 0
    )


def test_a_loss_says_itself_whether_zero_advantage_is_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registered loss that keeps log-probs near the old ones learns from all responses."""
    body = "    return -advantages(batch) * logprobs + 0.1 * (logprobs - old_logprobs) ** 2, 0 * logprobs\n"
    text = (
        "from tlt_megatron.policy.policy_loss import zero_without_advantage\n"
        "def advantages(batch):\n    return batch.advantages\n"
        f"def near(logprobs, old_logprobs, batch, section):\n{body}"
        "@zero_without_advantage\n"
        "def plain(logprobs, old_logprobs, batch, section):\n"
        "    return -advantages(batch) * logprobs, 0 * logprobs\n"
    )
    (tmp_path / "mine.py").write_text(text)
    point = REGISTRY["algorithm.loss"]
    built_in = {**point.built_in, "near": f"{tmp_path}/mine.py:near"}
    monkeypatch.setitem(REGISTRY, "algorithm.loss", point._replace(built_in=built_in))
    num_updated = {
        loss: sum(map(len, updated(_train(AlgorithmSection(loss=loss))[0])))
        for loss in ("ppo", "near", f"{tmp_path}/mine.py:plain", f"{tmp_path}/mine.py:near")
    }
    assert list(num_updated.values()) == [6, 15, 6, 15], num_updated
