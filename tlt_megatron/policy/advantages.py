"""The advantages of a scored batch, by `algorithm.advantage`. The policy trainer calls it.

A rank computes those of its share. What depends on other responses follows from their rewards and
lengths, which all ranks know, and from a few sums of each response, which ranks exchange. So the
result is the same on any number of ranks. A function of the user gets the whole batch on each rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_megatron.config.extensions import (
    REGISTRY,
    call_extension,
    load_extension,
    shapes_of,
    takes_optional,
)
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.exchange import gather_values
from tlt_megatron.rewards.advantage import OF_TOKENS, WHITENED, Moments, among_siblings
from tlt_megatron.runtime.collectives import gather_tensor, sum_tensor
from tlt_megatron.runtime.process_groups import SINGLE, Group
from tlt_megatron.types import Rollout, RolloutKey, ScoredGroup

_KEY = "algorithm.advantage"


def compute_advantages(
    scored: Sequence[ScoredGroup],
    section: AlgorithmSection,
    own: Sequence[Rollout],
    penalties: Mapping[RolloutKey, Tensor],
    values: Mapping[RolloutKey, Tensor] | None,
    dp: Group,
) -> tuple[dict[RolloutKey, Tensor], dict[RolloutKey, Tensor] | None]:
    """Return the advantages [T] of this rank's share `own`, from rewards less KL `penalties` [T].

    `penalties` and `values` are those of `own`. The shares of all data-parallel ranks make up the
    batch, and all ranks must call it. Advantages are computed from the policy's tokens alone, so no
    statistic of the batch counts an observation; those get 0. With a critic's `values` [T], also
    the returns [T]. ValueError if a function of the user returns other shapes.
    """
    penalties = {r.key: r.generated(penalties[r.key]) for r in own if penalties}
    kind, returns = section.advantage, None
    if kind not in REGISTRY[_KEY].built_in:
        everywhere = gather_values(penalties, dp) if section.has_kl_reward else {}
        found = _by_own_function(scored, section, own, everywhere)
    elif kind in OF_TOKENS:
        found, returns = _by_token(scored, section, own, penalties, values, dp)
    else:
        found = _by_response(scored, section, own, penalties, dp)
    return _with_observations(own, found), returns and _with_observations(own, returns)


def distill(
    own: Sequence[Rollout],
    advantages: Mapping[RolloutKey, Tensor],
    logprobs: Mapping[RolloutKey, Tensor],
    ref_logprobs: Mapping[RolloutKey, Tensor],
    coef: float,
    dp: Group,
) -> tuple[dict[RolloutKey, Tensor], dict[str, float]]:
    """Return the advantages less coef * (log p - log q) at each token of the policy, and metrics.

    The expectation of log p - log q over the policy's tokens is the reverse KL, so a policy that
    follows these advantages comes near the reference. All are [T] of the responses `own`. A
    collective of the data-parallel ranks.
    """
    ratios = {r.key: r.generated(logprobs[r.key] - ref_logprobs[r.key]) for r in own}
    ratios = _with_observations(own, ratios)
    (found,) = gather_statistics(own, [ratios], dp)
    changed = {key: advantages[key] - coef * ratio_T for key, ratio_T in ratios.items()}
    return changed, {"actor/reverse_kl": found.mean}


def zero_advantages(
    scored: Sequence[ScoredGroup], section: AlgorithmSection, dp: Group
) -> set[RolloutKey]:
    """Return the responses whose advantages are all 0, without KL penalties and a critic.

    A collective of the data-parallel ranks, each of which computes every dp.size-th response. With
    a function of the user, each computes all.
    """
    rollouts = _rollouts(scored)
    sharing = dp if section.advantage in REGISTRY[_KEY].built_in else SINGLE
    own = rollouts[sharing.rank :: sharing.size]
    advantages, _ = compute_advantages(scored, section, own, {}, None, sharing)
    is_zero_R = torch.zeros(len(rollouts), dtype=torch.uint8)
    zeros = [not advantage_T.any() for advantage_T in advantages.values()]
    is_zero_R[sharing.rank :: sharing.size] = torch.tensor(zeros).byte()
    flags = sum_tensor(is_zero_R, sharing).tolist()
    return {rollout.key for rollout, flag in zip(rollouts, flags, strict=True) if flag}


def _by_own_function(
    scored: Sequence[ScoredGroup],
    section: AlgorithmSection,
    own: Sequence[Rollout],
    penalties: Mapping[RolloutKey, Tensor],
) -> dict[RolloutKey, Tensor]:
    """Return what the user's function computes of the rewards of all tokens of the batch."""
    rewards = [
        [_token_rewards(*pair, penalties) for pair in zip(s.rollouts, s.rewards, strict=True)]
        for s in scored
    ]
    known: dict[str, object] = {"rewards": rewards}
    if takes_optional(_KEY, section.advantage):
        known["groups"] = tuple(scored)
    computed = call_extension(_KEY, section.advantage, **known, **section.advantage_args)
    found = shapes_of(computed)
    if not isinstance(found, list):
        raise ValueError(
            f"{_KEY}={section.advantage!r}: returned {found}, must be a list with an entry per prompt"
        )
    by_prompt = itertools.zip_longest(found, shapes_of(rewards), fillvalue=[])
    for i, (shapes, expected) in enumerate(by_prompt):
        if shapes != expected:
            raise ValueError(
                f"{_KEY}={section.advantage!r}: returned the shapes {shapes} for prompt {i} of the batch, "
                f"must be {expected}"
            )
    flat = [each for of_group in computed for each in of_group]
    whole = dict(zip((r.key for r in _rollouts(scored)), flat, strict=True))
    return {rollout.key: whole[rollout.key].float() for rollout in own}


def _by_token(
    scored: Sequence[ScoredGroup],
    section: AlgorithmSection,
    own: Sequence[Rollout],
    penalties: Mapping[RolloutKey, Tensor],
    values: Mapping[RolloutKey, Tensor] | None,
    dp: Group,
) -> tuple[dict[RolloutKey, Tensor], dict[RolloutKey, Tensor] | None]:
    keys = [rollout.key for rollout in own]
    rewards, compute = _own_rewards(scored, own, penalties), load_extension(_KEY, section.advantage)
    if values is None:
        raw, returns = compute(rewards, section.gamma), None
    else:
        known = [rollout.generated(values[rollout.key]) for rollout in own]
        raw, returns = compute(rewards, known, section.gamma, section.lam)
        returns = dict(zip(keys, returns, strict=True))
    rows = [torch.stack(Moments.of(each)[1:]) for each in raw]
    total_R, squares_R = _share_rows(scored, own, rows, 2, dp).unbind(1)
    moments = Moments(_lengths(scored), total_R, squares_R).over_parts()
    return dict(zip(keys, map(moments.whiten, raw), strict=True)), returns


def _by_response(
    scored: Sequence[ScoredGroup],
    section: AlgorithmSection,
    own: Sequence[Rollout],
    penalties: Mapping[RolloutKey, Tensor],
    dp: Group,
) -> dict[RolloutKey, Tensor]:
    """Return one advantage for all tokens of a response. Its reward is summed over its tokens."""
    rewards_R = torch.tensor([r for s in scored for r in s.rewards], dtype=torch.float64)
    if section.has_kl_reward:
        rows = [reward_T.sum()[None] for reward_T in _own_rewards(scored, own, penalties)]
        rewards_R = _share_rows(scored, own, rows, 1, dp).squeeze(1)
    baseline = load_extension(_KEY, section.advantage)
    groups = rewards_R.split([len(s.rewards) for s in scored])
    if section.is_sft:
        advantages_R = torch.cat([baseline(rewards_G).float() for rewards_G in groups])
    else:
        advantages_R = torch.cat([among_siblings(baseline, rewards_G) for rewards_G in groups])
    if section.advantage in WHITENED:
        lengths_R = _lengths(scored)
        total_R = lengths_R * advantages_R
        moments = Moments(lengths_R, total_R, torch.zeros_like(total_R)).over_parts()
        advantages_R = moments.whiten(advantages_R.double())
    places = _places(scored)
    return {r.key: advantages_R[places[r.key]].expand(r.num_generated).clone() for r in own}


# ---- a batch and this rank's share


def _rollouts(scored: Sequence[ScoredGroup]) -> list[Rollout]:
    return [rollout for s in scored for rollout in s.rollouts]


def _places(scored: Sequence[ScoredGroup]) -> dict[RolloutKey, int]:
    """Return the index of each response in the batch."""
    return {rollout.key: i for i, rollout in enumerate(_rollouts(scored))}


def _lengths(scored: Sequence[ScoredGroup]) -> Tensor:
    """Return the number of the policy's tokens of each response, [R] float64."""
    return torch.tensor([r.num_generated for r in _rollouts(scored)], dtype=torch.float64)


def _share_rows(
    scored: Sequence[ScoredGroup],
    own: Sequence[Rollout],
    rows: Sequence[Tensor],
    num_columns: int,
    dp: Group,
) -> Tensor:
    """Return the rows [C] float64 of all responses, [R, C], of which this rank has those of `own`.

    Each row comes from one rank, so the sum over ranks is exact.
    """
    places = _places(scored)
    table_RC = torch.zeros(len(places), num_columns, dtype=torch.float64)
    for rollout, row_C in zip(own, rows, strict=True):
        table_RC[places[rollout.key]] = row_C
    return sum_tensor(table_RC, dp)


def _own_rewards(
    scored: Sequence[ScoredGroup], own: Sequence[Rollout], penalties: Mapping[RolloutKey, Tensor]
) -> list[Tensor]:
    places, rewards = _places(scored), [reward for s in scored for reward in s.rewards]
    return [_token_rewards(r, rewards[places[r.key]], penalties) for r in own]


def _token_rewards(
    rollout: Rollout, reward: float, penalties: Mapping[RolloutKey, Tensor]
) -> Tensor:
    """Return float64: the reward of each turn at its last token, the rest of the reward at the last
    token, less the penalty of each token of the policy.
    """
    reward_T = torch.zeros(rollout.num_generated, dtype=torch.float64)
    ends = itertools.accumulate(turn.num_tokens for turn in rollout.turns)
    for end, turn in zip(ends, rollout.turns, strict=True):
        reward_T[end - 1] = turn.reward
    reward_T[-1] += math.fsum((reward, *(-turn.reward for turn in rollout.turns)))
    return reward_T - penalties[rollout.key] if rollout.key in penalties else reward_T


def _with_observations(
    own: Sequence[Rollout], values: Mapping[RolloutKey, Tensor]
) -> dict[RolloutKey, Tensor]:
    """Return [T] of each response: `values` at the tokens of the policy, 0 at observations."""
    found = {}
    for rollout in own:
        found[rollout.key] = values_T = values[rollout.key]
        if rollout.loss_mask is not None:
            whole_T = values_T.new_zeros(rollout.token_ids.numel())
            whole_T[rollout.loss_mask] = values_T
            found[rollout.key] = whole_T
    return found


# ---- metrics


class TokenStatistics(NamedTuple):
    """Statistics over the policy's tokens of a batch."""

    mean: float
    max: float
    min: float
    variance: float  # with N

    def metrics(self, name: str) -> dict[str, float]:
        """Return mean, maximum and minimum."""
        return {f"{name}/mean": self.mean, f"{name}/max": self.max, f"{name}/min": self.min}


def gather_statistics(
    own: Sequence[Rollout], values: Sequence[Mapping[RolloutKey, Tensor]], dp: Group
) -> list[TokenStatistics]:
    """Return the statistics of each of the `values` [T] of the batch, of which this rank has those
    of `own`. A collective of the data-parallel ranks.
    """
    none, rows = torch.empty(0), []
    for each in values:
        tokens_N = torch.cat([none, *(r.generated(each[r.key]) for r in own)]).double()
        bounds = (
            sign * torch.nn.functional.pad(sign * tokens_N, (0, 1), value=-torch.inf).max()
            for sign in (1, -1)
        )
        rows.append(torch.stack([*Moments.of(tokens_N), *bounds]))
    found = []
    for parts in gather_tensor(torch.stack(rows), dp).unbind(1):
        *moments, highest, lowest = parts.unbind(1)
        whole = Moments(*moments).over_parts()
        mean, variance = whole.total / whole.count, whole.squares / whole.count
        numbers = map(float, (mean, highest.max(), lowest.min(), variance))
        found.append(TokenStatistics(*numbers))
    return found


def advantage_metrics(
    own: Sequence[Rollout],
    advantages: Mapping[RolloutKey, Tensor],
    returns: Mapping[RolloutKey, Tensor] | None,
    dp: Group,
) -> dict[str, float]:
    """Return statistics over the policy's tokens. Without a critic the returns are the advantages,
    as in verl. A collective of the data-parallel ranks.
    """
    found = gather_statistics(own, [advantages, returns or advantages], dp)
    names = ("critic/advantages", "critic/returns")
    return {
        k: v for name, each in zip(names, found, strict=True) for k, v in each.metrics(name).items()
    }
