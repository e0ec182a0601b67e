"""The advantages of a scored batch, by `algorithm.advantage`. The policy trainer calls it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tlt_megatron.config.extensions import call_extension, shapes_of
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.batching import RolloutKey, key_of
from tlt_megatron.types import Rollout, ScoredGroup


def compute_advantages(
    scored: Sequence[ScoredGroup],
    section: AlgorithmSection,
    penalties: Mapping[RolloutKey, Tensor],
    values: Mapping[RolloutKey, Tensor] | None,
) -> tuple[dict[RolloutKey, Tensor], dict[RolloutKey, Tensor] | None]:
    """Return the advantages [T] of every rollout, from rewards less KL `penalties` [T].

    They are computed from the policy's tokens alone, so no statistic of the batch counts an
    observation; those get 0. With a critic's `values` [T], also the returns [T]. ValueError if a
    function of the user returns other shapes.
    """
    rewards = [
        [
            _token_rewards(rollout, reward, penalties.get(key_of(rollout)))
            for rollout, reward in zip(s.rollouts, s.rewards, strict=True)
        ]
        for s in scored
    ]
    name = "algorithm.advantage", section.advantage
    if values is not None:
        known = generated_tokens(scored, values)
        nested = [[known[key_of(r)] for r in s.rollouts] for s in scored]
        computed, returns = call_extension(
            *name, rewards=rewards, values=nested, gamma=section.gamma, lam=section.lam
        )
        return _by_rollout(scored, computed), _by_rollout(scored, returns)
    discount = {"gamma": section.gamma} if section.advantage == "reinforce_plus_plus" else {}
    computed = call_extension(*name, rewards=rewards, **discount)
    found = shapes_of(computed)
    if not isinstance(found, list):
        raise ValueError(
            f"algorithm.advantage={section.advantage!r}: returned {found}, must be a list with an entry per prompt"
        )
    by_prompt = itertools.zip_longest(found, shapes_of(rewards), fillvalue=[])
    for i, (shapes, expected) in enumerate(by_prompt):
        if shapes != expected:
            raise ValueError(
                f"algorithm.advantage={section.advantage!r}: returned the shapes {shapes} for prompt {i} of the batch, "
                f"must be {expected}"
            )
    return _by_rollout(scored, computed), None


def advantage_metrics(
    scored: Sequence[ScoredGroup],
    advantages: Mapping[RolloutKey, Tensor],
    returns: Mapping[RolloutKey, Tensor] | None,
) -> dict[str, float]:
    """Return statistics over the policy's tokens. Without a critic the returns are the advantages,
    as in verl.
    """
    return token_statistics("critic/advantages", generated_tokens(scored, advantages)) | (
        token_statistics("critic/returns", generated_tokens(scored, returns or advantages))
    )


def token_statistics(name: str, values: Mapping[RolloutKey, Tensor]) -> dict[str, float]:
    """Return mean, maximum and minimum over all tokens."""
    tokens_N = torch.cat(list(values.values())).double()
    return {
        f"{name}/mean": float(tokens_N.mean()),
        f"{name}/max": float(tokens_N.max()),
        f"{name}/min": float(tokens_N.min()),
    }


def generated_tokens(
    scored: Sequence[ScoredGroup], values: Mapping[RolloutKey, Tensor]
) -> dict[RolloutKey, Tensor]:
    """Return those of the `values` [T] of each response that belong to the policy's tokens."""
    return {
        key_of(rollout): rollout.generated(values[key_of(rollout)])
        for s in scored
        for rollout in s.rollouts
    }


def _token_rewards(rollout: Rollout, reward: float, penalty_T: Tensor | None) -> Tensor:
    """Return float64: the reward at the last token, less the penalty of each token of the
    policy.
    """
    reward_T = torch.zeros(rollout.num_generated, dtype=torch.float64)
    reward_T[-1] = reward
    return reward_T if penalty_T is None else reward_T - rollout.generated(penalty_T)


def _by_rollout(
    scored: Sequence[ScoredGroup], values: Sequence[Sequence[Tensor]]
) -> dict[RolloutKey, Tensor]:
    return {
        key_of(rollout): _with_observations(rollout, each.float())
        for s, of_group in zip(scored, values, strict=True)
        for rollout, each in zip(s.rollouts, of_group, strict=True)
    }


def _with_observations(rollout: Rollout, values: Tensor) -> Tensor:
    """Return [T]: `values` at the tokens of the policy, 0 at observations."""
    if rollout.loss_mask is None:
        return values
    values_T = values.new_zeros(rollout.token_ids.numel())
    values_T[rollout.loss_mask] = values
    return values_T
