"""Advantages against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tlt_megatron.config.extensions import load_extension

REWARDS = [(1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0)]
LENGTHS = [(2, 1, 3, 1), (1, 1, 1, 2)]


def compute_advantages(
    kind: str,
    rewards: list[tuple[float, ...]],
    lengths: list[tuple[int, ...]],
    penalties: list[list[torch.Tensor]] | None = None,
) -> list[list[torch.Tensor]]:
    """Of responses with the given rewards at their last tokens, minus the penalty of each token."""
    token_rewards = []
    for i, group in enumerate(rewards):
        row = []
        for g, reward in enumerate(group):
            reward_T = torch.zeros(lengths[i][g], dtype=torch.float64)
            reward_T[-1] = reward
            row.append(reward_T - penalties[i][g] if penalties else reward_T)
        token_rewards.append(row)
    return load_extension("algorithm.advantage", kind)(rewards=token_rewards)


def firsts(advantages: list) -> list[list[float]]:
    return [[float(a[0]) for a in group] for group in advantages]


def test_grpo_divides_the_centred_reward_by_the_sample_deviation() -> None:
    advantages = compute_advantages("grpo", REWARDS, LENGTHS)
    # mean 1/2, squared deviations 4 x 1/4, std sqrt(1 / 3)
    up = 0.5 / math.sqrt(1 / 3)
    assert firsts(advantages)[0] == pytest.approx([up, -up, -up, up], rel=1e-5)
    assert [a.numel() for a in advantages[0]] == [2, 1, 3, 1]
    assert advantages[0][2].unique().numel() == 1


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_equal_rewards_has_no_advantage(kind: str) -> None:
    assert firsts(compute_advantages(kind, REWARDS, LENGTHS))[1] == [0.0] * 4
    # float64's mean of three times 0.1 is not 0.1
    assert firsts(compute_advantages(kind, [(0.1,) * 3], [(2, 1, 3)])) == [[0.0] * 3]


def test_dr_grpo_only_centres() -> None:
    assert firsts(compute_advantages("dr_grpo", REWARDS, LENGTHS))[0] == [0.5, -0.5, -0.5, 0.5]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # first sibling: 1 - (0 + 0 + 1) / 3; second: 0 - (1 + 0 + 1) / 3
    expected = [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3]
    assert firsts(compute_advantages("rloo", REWARDS, LENGTHS))[0] == pytest.approx(expected)


def test_reinforce_plus_plus_whitens_over_all_tokens() -> None:
    advantages = compute_advantages("reinforce_plus_plus", [(1.0,), (0.0,)], [(3,), (1,)])
    # tokens 1 1 1 0: mean 3/4, variance (3/16 + 9/16) / 3 = 1/4
    assert torch.allclose(advantages[0][0], torch.full((3,), 0.5), atol=1e-5)
    assert torch.allclose(advantages[1][0], torch.tensor([-1.5]), atol=1e-5)


def test_reinforce_plus_plus_penalty_counts_from_its_token_on() -> None:
    penalties = [[torch.tensor([0.0, 1.0, 0.0])], [torch.tensor([2.0])]]
    advantages = compute_advantages(
        "reinforce_plus_plus", [(1.0,), (0.0,)], [(3,), (1,)], penalties
    )
    # returns: 1-1, 1-1, 1-0 and 0-2 -> 0 0 1 -2: mean -1/4, variance (2/16 + 25/16 + 49/16) / 3
    std = math.sqrt((2 / 16 + 25 / 16 + 49 / 16) / 3)
    expected = torch.tensor([0.25, 0.25, 1.25]) / std
    assert torch.allclose(advantages[0][0], expected, atol=1e-5)


def test_gamma_discounts_the_reward_of_reinforce_plus_plus() -> None:
    """Returns 1/4, 1/2, 1 and 0: mean 7/16, and the mean over all tokens is subtracted."""
    rewards = [[torch.tensor([0.0, 0.0, 1.0]).double()], [torch.zeros(1).double()]]
    returns = [0.25, 0.5, 1.0, 0.0]
    std = math.sqrt(sum((each - 7 / 16) ** 2 for each in returns) / 3)
    advantages = load_extension("algorithm.advantage", "reinforce_plus_plus")(
        rewards=rewards, gamma=0.5
    )
    found = [float(a) for group in advantages for each in group for a in each]
    assert found == pytest.approx([(each - 7 / 16) / std for each in returns], rel=1e-5)


def test_reinforce_plus_plus_with_group_baseline_centres_by_group_and_whitens_over_tokens() -> None:
    rewards, lengths = [(1.0, 0.0), (0.0, 0.0)], [(3, 1), (1, 1)]
    advantages = compute_advantages("reinforce_plus_plus_baseline", rewards, lengths)
    # tokens 1/2 1/2 1/2 -1/2 0 0: mean 1/6, variance (1 - 6/36) / 5 = 1/6
    std = math.sqrt(1 / 6)
    assert firsts(advantages)[0] == pytest.approx([(1 / 3) / std, (-2 / 3) / std], rel=1e-4)
    assert firsts(advantages)[1] == pytest.approx([(-1 / 6) / std] * 2, rel=1e-4)
    assert [a.numel() for a in advantages[0]] == [3, 1]


def test_reinforce_plus_plus_of_a_single_token_is_zero() -> None:
    advantages = compute_advantages("reinforce_plus_plus", [(1.0,)], [(1,)])
    assert firsts(advantages) == [[0.0]]


def test_group_baselines_sum_the_penalty_of_a_response_into_its_reward() -> None:
    penalties = [[torch.tensor([0.25, 0.25]), torch.tensor([0.0])]]
    advantages = compute_advantages("dr_grpo", [(1.0, 0.0)], [(2, 1)], penalties)
    assert firsts(advantages)[0] == [0.25, -0.25]


def test_gae_sums_the_discounted_errors_of_the_critic() -> None:
    rewards = [[torch.tensor([0.0, 0.0, 1.0]).double()], [torch.tensor([-1.0]).double()]]
    values = [[torch.tensor([0.5, 0.25, 0.75])], [torch.tensor([0.0])]]
    gae = load_extension("algorithm.advantage", "gae")
    advantages, returns = gae(rewards=rewards, values=values, gamma=0.5, lam=0.5)
    # errors: 0 + 0.5 * 0.25 - 0.5 = -0.375, 0 + 0.5 * 0.75 - 0.25 = 0.125, 1 - 0.75 = 0.25
    # advantages: 0.25, 0.125 + 0.25 * 0.25 = 0.1875, -0.375 + 0.25 * 0.1875 = -0.328125; and -1
    raw = torch.tensor([-0.328125, 0.1875, 0.25, -1.0])
    assert torch.equal(returns[0][0], torch.tensor([0.171875, 0.4375, 1.0]))
    assert torch.equal(returns[1][0], torch.tensor([-1.0]))
    # mean -57/256, so in 256ths the differences are -27, 105, 121, -199
    std = math.sqrt((27**2 + 105**2 + 121**2 + 199**2) / 3) / 256
    expected = torch.tensor([-27.0, 105.0, 121.0, -199.0]) / 256 / std
    assert torch.allclose(raw - raw.mean(), expected * std)
    assert torch.allclose(torch.cat([advantages[0][0], advantages[1][0]]), expected, atol=1e-5)
    assert advantages[0][0].dtype == returns[0][0].dtype == torch.float32
