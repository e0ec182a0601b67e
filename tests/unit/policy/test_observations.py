"""Observations of an environment inside a response: no number of the update depends on them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.policy_batches import make_rollout, make_trainer
from tests.unit.policy.test_policy_trainer import SECTIONS, FakeModel, scored_batch
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.advantages import compute_advantages
from tlt_megatron.policy.batching import attach_targets, count_loss, pack_share
from tlt_megatron.policy.policy_loss import policy_loss
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.types import Rollout, ScoredGroup, TokenLogprobs


def observed(rollout: Rollout) -> Rollout:
    """The same response with three observation tokens before its last token."""
    head, tail = rollout.token_ids[:-1], rollout.token_ids[-1:]
    nothing, seen = torch.zeros(3), torch.tensor([7, 8, 7])
    mask = torch.ones(rollout.token_ids.numel() + 3, dtype=torch.bool)
    mask[-4:-1] = False
    return dataclasses.replace(
        rollout,
        token_ids=torch.cat((head, seen, tail)),
        logprobs=torch.cat((rollout.logprobs[:-1], nothing, rollout.logprobs[-1:])),
        policy_logprobs=torch.cat(
            (rollout.policy_logprobs[:-1], nothing, rollout.policy_logprobs[-1:])
        ),
        loss_mask=mask,
        versions=((rollout.policy_version, mask.numel()),),
    )


def with_observations(scored: ScoredGroup) -> ScoredGroup:
    rollouts = tuple(map(observed, scored.rollouts))
    return dataclasses.replace(scored, rollouts=rollouts)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.advantage}-{s.loss}")
def test_metrics_of_a_batch_are_those_without_observations(section: AlgorithmSection) -> None:
    """The fake model's log-probs depend on the label alone, so only counts and masks could
    differ.
    """
    found = []
    for scored in (scored_batch(), [with_observations(group) for group in scored_batch()]):
        trainer = make_trainer(FakeModel(), section, micro_batch_tokens=40)
        inference = trainer.infer_logprobs(trainer.plan(scored))
        advantages = {
            key: scored[key[0]].rollouts[key[1]].generated(advantage_T).tolist()
            for key, advantage_T in inference.advantages.items()
        }
        found.append((advantages, inference.metrics | trainer.update(inference)))
    (advantages, metrics), (others, with_observed) = found
    assert others == advantages
    assert with_observed == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "weight", "count"),
    [("token_mean", 1.0, 3), ("sequence_mean", 1 / 3, 1), ("sequence_sum", 1 / 8, 1)],
)
def test_a_masked_loss_and_its_gradient_by_hand(
    aggregation: str, weight: float, count: int
) -> None:
    """Prompt [1], turn [2 3], observation [4 5], turn [6]: -ratio * advantage of the three tokens
    of the policy alone.
    """
    rollout = make_rollout(
        (1,),
        torch.tensor([2, 3, 4, 5, 6]),
        logprobs=torch.tensor([-1.0, -2.0, 0.0, 0.0, -3.0]),
        loss_mask=torch.tensor([True, True, False, False, True]),
    )
    section = AlgorithmSection(entropy_coef=0.5, aggregation=aggregation)
    targets = {
        "advantages": {(0, 0): torch.tensor([2.0, 2.0, 9.0, 9.0, 2.0])},
        "old_logprobs": {(0, 0): torch.tensor([-1.0, -2.0, 50.0, -50.0, -3.0])},
    }
    batch = attach_targets(pack_share([rollout], 9)[0], targets, section, 8)
    assert batch.loss_mask.tolist() == [1, 1, 0, 0, 1, 0]
    assert batch.loss_count == count_loss([rollout], section) == count
    logprobs = torch.tensor([-1.0, -2.0, -7.0, -8.0, -3.0, -9.0], requires_grad=True)
    entropy = torch.tensor([1.0, 2.0, 100.0, 100.0, 3.0, 100.0])
    predicted = TokenLogprobs(logprobs=logprobs, entropy=entropy, policy_logprobs=logprobs)
    result = policy_loss(predicted, batch, section)
    result.loss_sum.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2 * weight, -2 * weight, 0, 0, -2 * weight, 0])
    assert float(result.loss_sum.detach()) == pytest.approx(weight * (-6.0 - 0.5 * 6.0))
    assert result.metrics["entropy"] == 6.0
    assert result.metrics["ppo_kl"] == 0.0


def test_a_critic_learns_nothing_from_observations() -> None:
    plain = scored_batch()
    mixed = [with_observations(group) for group in plain]
    values, seen = {}, {}
    for i, group in enumerate(plain):
        for rollout, other in zip(group.rollouts, mixed[i].rollouts, strict=True):
            key = i, rollout.sample_index
            values[key] = torch.cos(rollout.token_ids.float())
            seen[key] = torch.full((other.token_ids.numel(),), 9.0)  # any size at observations
            seen[key][other.loss_mask] = values[key]
    section = AlgorithmSection(advantage="gae", lam=0.9)
    (of_plain, expected), (of_mixed, found) = (
        (own, compute_advantages(scored, section, own, {}, known, SINGLE))
        for scored, known in ((plain, values), (mixed, seen))
        for own in [[rollout for group in scored for rollout in group.rollouts]]
    )
    assert [r.key for r in of_plain] == [r.key for r in of_mixed]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        for rollout in of_mixed:
            key = rollout.key
            assert torch.equal(rollout.generated(mine[key]), theirs[key])
        assert not any(value_T[-4:-1].any() for value_T in mine.values())
