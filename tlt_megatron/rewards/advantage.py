"""Turns rewards into advantages, one per response token: the choices of `algorithm.advantage`.

Each function takes `rewards[i][g]`, [T] float64, of response g to prompt i, for the whole batch. It
returns the advantages in the same layout, float32. The reward of a response is at its last token. A
KL penalty in the reward is subtracted at each token. The policy trainer calls the function on every
rank, so the statistics of groups and of the batch are the same everywhere. Except `gae` and
`reinforce_plus_plus`, they treat a response as one action: the reward is summed over its tokens.
`gae` needs the values of a critic, and also returns what the critic is to learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Rewards = Sequence[Sequence[Tensor]]
STD_EPS = 1e-6


def grpo(rewards: Rewards) -> list[list[Tensor]]:
    """(r - mean) / (std + 1e-6) among siblings, std with G - 1 (Shao et al. 2024, sec. 4.1.2)."""
    return _by_group(rewards, lambda r_G: (r_G - r_G.mean()) / (r_G.std() + STD_EPS))


def dr_grpo(rewards: Rewards) -> list[list[Tensor]]:
    """r - mean (Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2)."""
    return _by_group(rewards, lambda r_G: r_G - r_G.mean())


def rloo(rewards: Rewards) -> list[list[Tensor]]:
    """r - mean of the other siblings (Ahmadian et al. 2024, eq. 8)."""
    return _by_group(rewards, lambda r_G: (r_G - r_G.mean()) * (r_G.numel() / (r_G.numel() - 1)))


def reinforce_plus_plus(rewards: Rewards, gamma: float = 1.0) -> list[list[Tensor]]:
    """Discounted reward to go, whitened over all tokens of the batch (Hu 2025, eq. 5-6)."""
    no_values = [[torch.zeros_like(reward_T) for reward_T in group] for group in rewards]
    return gae(rewards, no_values, gamma, lam=1.0)[0]


def reinforce_plus_plus_baseline(rewards: Rewards) -> list[list[Tensor]]:
    """r - mean of the siblings, whitened over all tokens of the batch (Hu 2025, REINFORCE++ with
    baseline)."""
    return _whiten(_by_group(rewards, lambda r_G: r_G - r_G.mean()))


def gae(
    rewards: Rewards, values: Rewards, gamma: float, lam: float
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 11-12, 16).

    With d_t = r_t + gamma V_(t+1) - V_t, and V = 0 after the last token:
    A_t = sum over l of (gamma lam)^l d_(t+l). `values[i][g]` is [T], V_t before token t is drawn.
    Returns the advantages, whitened over all tokens of the batch as in verl's `masked_whiten`, and
    the returns A_t + V_t before that, both float32.
    """
    # Zeros behind the end of a response stand for no reward and no value there.
    flat = [value_T.double() for group in values for value_T in group]
    rewards_TB = pad_sequence([reward_T for group in rewards for reward_T in group])
    values_TB = pad_sequence(flat)
    advantages_TB = rewards_TB - values_TB
    advantages_TB[:-1] += gamma * values_TB[1:]
    for t in range(len(advantages_TB) - 2, -1, -1):
        advantages_TB[t] += gamma * lam * advantages_TB[t + 1]
    columns = iter(advantages_TB.unbind(1))
    advantages = [[next(columns)[: value_T.numel()] for value_T in group] for group in values]
    returns = [
        [(advantage_T + value_T).float() for advantage_T, value_T in zip(*pair, strict=True)]
        for pair in zip(advantages, values, strict=True)
    ]
    return _whiten(advantages), returns


def _whiten(values: Rewards) -> list[list[Tensor]]:
    flat = torch.cat([value_T for group in values for value_T in group])
    mean = flat.mean()
    std = flat.std() if flat.numel() > 1 else torch.zeros_like(mean)  # std of one token is NaN
    return [[((value_T - mean) / (std + STD_EPS)).float() for value_T in g] for g in values]


def _by_group(rewards: Rewards, baseline: Callable[[Tensor], Tensor]) -> list[list[Tensor]]:
    advantages = []
    for group in rewards:
        reward_G = torch.stack([reward_T.sum() for reward_T in group])
        advantage_G = baseline(reward_G).float()
        if (reward_G == reward_G[0]).all():  # their mean may differ from them by rounding
            advantage_G.zero_()
        advantages.append(
            [a.expand_as(reward_T).clone() for a, reward_T in zip(advantage_G, group, strict=True)]
        )
    return advantages
