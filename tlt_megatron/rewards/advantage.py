"""Turns rewards into advantages: the choices of `algorithm.advantage`. `policy/advantages.py` calls
them.

Functions that compare siblings treat a response as one action. They take the rewards of the G
responses to one prompt, [G] float64, and return their advantages. `gae` and `reinforce_plus_plus`
take rewards per token, [T] float64 of each response of this rank's share. Those of one response do
not depend on the others. What is whitened is scaled by `Moments` of the whole batch afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

STD_EPS = 1e-6
OF_TOKENS = ("gae", "reinforce_plus_plus")
WHITENED = (*OF_TOKENS, "reinforce_plus_plus_baseline")


def grpo(rewards_G: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-6) among siblings, std with G - 1 (Shao et al. 2024, sec. 4.1.2)."""
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + STD_EPS)


def dr_grpo(rewards_G: Tensor) -> Tensor:
    """r - mean (Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2)."""
    return rewards_G - rewards_G.mean()


def rloo(rewards_G: Tensor) -> Tensor:
    """r - mean of the other siblings (Ahmadian et al. 2024, eq. 8)."""
    return dr_grpo(rewards_G) * (rewards_G.numel() / (rewards_G.numel() - 1))


# r - mean of the siblings too, to be whitened over all tokens of the batch (Hu 2025)
reinforce_plus_plus_baseline = dr_grpo


def reinforce_plus_plus(rewards: Sequence[Tensor], gamma: float) -> list[Tensor]:
    """Discounted reward to go, to be whitened over all tokens of the batch (Hu 2025, eq. 5-6)."""
    return gae(rewards, [torch.zeros_like(each) for each in rewards], gamma, lam=1.0)[0]


def gae(
    rewards: Sequence[Tensor], values: Sequence[Tensor], gamma: float, lam: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 11-12, 16).

    With d_t = r_t + gamma V_(t+1) - V_t, and V = 0 after the last token:
    A_t = sum over l of (gamma lam)^l d_(t+l). `values` are [T], V_t before token t is drawn.
    Returns the advantages, float64, which are to be whitened over all tokens of the batch, and the
    returns A_t + V_t before that, float32.
    """
    if not rewards:
        return [], []
    # Zeros behind the end of a response stand for no reward and no value there.
    rewards_TB = pad_sequence(list(rewards))
    values_TB = pad_sequence([value_T.double() for value_T in values])
    advantages_TB = rewards_TB - values_TB
    advantages_TB[:-1] += gamma * values_TB[1:]
    for t in range(len(advantages_TB) - 2, -1, -1):
        advantages_TB[t] += gamma * lam * advantages_TB[t + 1]
    columns = zip(advantages_TB.unbind(1), values, strict=True)
    advantages = [column[: value_T.numel()] for column, value_T in columns]
    pairs = zip(advantages, values, strict=True)
    return advantages, [(advantage_T + value_T).float() for advantage_T, value_T in pairs]


def among_siblings(baseline: Callable[[Tensor], Tensor], rewards_G: Tensor) -> Tensor:
    """Return the advantages [G] float32 of one group. They are exactly 0 where all rewards are
    equal, whose mean may differ from them by rounding.
    """
    advantages_G = baseline(rewards_G).float()
    return advantages_G.zero_() if (rewards_G == rewards_G[0]).all() else advantages_G


def sft(rewards_G: Tensor) -> Tensor:
    """1: the right responses of the data set are imitated, whatever their reward."""
    return torch.ones_like(rewards_G)


class Moments(NamedTuple):
    """Mean and variance of values that are known in parts, such as the tokens of each response.

    Example: `Moments.of(torch.tensor([1.0, 3.0]))` has count 2, total 4 and squares 2.
    """

    count: Tensor  # [N] float64, of each part
    total: Tensor  # [N] float64
    squares: Tensor  # [N] float64, sum of squared differences from the part's own mean

    @classmethod
    def of(cls, values_T: Tensor) -> Moments:
        """Return the moments of one part, scalars. A part may be empty."""
        values_T = values_T.double()
        total = values_T.sum()
        mean = total / max(values_T.numel(), 1)
        count = torch.tensor(float(values_T.numel()), dtype=torch.float64)
        return cls(count, total, (values_T - mean).square().sum())

    def over_parts(self) -> Moments:
        """Return the moments of all parts together, scalars (Chan et al. 1979)."""
        mean = self.total.sum() / self.count.sum()
        between = self.count * (self.total / self.count.clamp(min=1) - mean).square()
        squares = (self.squares + between.where(self.count > 0, 0.0)).sum()
        return Moments(self.count.sum(), self.total.sum(), squares)

    def whiten(self, values: Tensor) -> Tensor:
        """Return (values - mean) / (std + 1e-6) in float32, as verl's `masked_whiten`.

        The std is the unbiased one, and 0 for a single value.
        """
        std = (self.squares / (self.count - 1).clamp(min=1)).sqrt()
        return ((values - self.total / self.count) / (std + STD_EPS)).float()
