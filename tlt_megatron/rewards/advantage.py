"""Turns the rewards of sibling responses into advantages, one value per response token.

The policy trainer calls it on every rank with the whole batch, so group and batch statistics are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STD_EPS = 1e-6


def compute_advantages(
    kind: str,
    rewards: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    penalties: Sequence[Sequence[Tensor]] | None = None,
) -> list[list[Tensor]]:
    """Return advantages [T] float32 for each response of each group.

    `rewards[i][g]` and `lengths[i][g]` (tokens T) belong to sibling g of prompt i. `penalties[i][g]` [T] is subtracted from the
    reward token by token (KL in the reward). `kind` is one of

    - grpo: (r - mean) / (std + 1e-6) among siblings, std with G - 1 (Shao et al. 2024, DeepSeekMath, section 4.1.2);
    - dr_grpo: r - mean (Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2);
    - rloo: r - mean of the other siblings (Ahmadian et al. 2024, eq. 8);
    - reinforce_plus_plus: reward to go, whitened over all tokens of the batch (Hu 2025, REINFORCE++, eq. 5-6).

    The first three treat a response as one action: its penalty is summed into its reward.
    """
    if kind == "reinforce_plus_plus":
        return _reinforce_plus_plus(rewards, lengths, penalties)
    advantages = []
    for i, group in enumerate(rewards):
        reward_G = torch.tensor(group, dtype=torch.float64)
        if penalties is not None:
            reward_G -= torch.stack([p.sum(dtype=torch.float64) for p in penalties[i]])
        advantage_G = _GROUP_BASELINES[kind](reward_G)
        advantages.append(
            [advantage_G[g].float().expand(length).clone() for g, length in enumerate(lengths[i])]
        )
    return advantages


def _grpo(reward_G: Tensor) -> Tensor:
    return (reward_G - reward_G.mean()) / (reward_G.std() + STD_EPS)


def _dr_grpo(reward_G: Tensor) -> Tensor:
    return reward_G - reward_G.mean()


def _rloo(reward_G: Tensor) -> Tensor:
    return (reward_G - reward_G.mean()) * (reward_G.numel() / (reward_G.numel() - 1))


_GROUP_BASELINES = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}


def _reinforce_plus_plus(
    rewards: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    penalties: Sequence[Sequence[Tensor]] | None,
) -> list[list[Tensor]]:
    returns = []
    for i, group in enumerate(rewards):
        row = []
        for g, reward in enumerate(group):
            return_T = torch.full((lengths[i][g],), reward, dtype=torch.float64)
            if penalties is not None:  # sum of the penalties from t on
                return_T -= penalties[i][g].double().flip(0).cumsum(0).flip(0)
            row.append(return_T)
        returns.append(row)
    flat = torch.cat([return_T for row in returns for return_T in row])
    mean = flat.mean()
    std = flat.std() if flat.numel() > 1 else torch.zeros_like(mean)  # std of one token is NaN
    return [[((return_T - mean) / (std + STD_EPS)).float() for return_T in row] for row in returns]
