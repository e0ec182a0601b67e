"""Advantages against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.policy_batches import make_rollout, score
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.advantages import compute_advantages
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.types import RolloutKey

# The rewards of tokens, of responses, of groups. In the first group two responses score 1 and two
# 0.
GROUPS = [[[0.0, 1.0], [0.0], [0.0, 0.0, 0.0], [1.0]], [[0.0], [0.0], [0.0], [0.0, 0.0]]]
EQUAL = [[[0.0, 0.1], [0.1], [0.0, 0.0, 0.1]]]  # float64's mean of three times 0.1 is not 0.1
TWO = [[[0.0, 0.0, 1.0]], [[0.0]]]
PENALIZED = [[[0.0, -1.0, 1.0]], [[-2.0]]]


def whitened(values: list[float], mean: float) -> list[float]:
    """`values` less their mean, over their sample deviation."""
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return [(value - mean) / std for value in values]


def advantages_of(
    tokens: list[list[list[float]]],
    section: AlgorithmSection,
    values: dict[RolloutKey, torch.Tensor] | None = None,
) -> tuple[dict[RolloutKey, torch.Tensor], dict[RolloutKey, torch.Tensor] | None]:
    """Those of responses with these rewards of tokens. With a KL penalty, all rewards come from
    it.
    """
    scored, penalties = [], {}
    for i, group in enumerate(tokens):
        rollouts = [
            make_rollout((1,), torch.zeros(len(r)).long(), (i, g)) for g, r in enumerate(group)
        ]
        scored.append(score(rollouts, [0.0 if section.kl_coef else r[-1] for r in group]))
        penalties |= {r.key: -torch.tensor(t) for r, t in zip(rollouts, group, strict=True)}
    own = [rollout for group in scored for rollout in group.rollouts]
    return compute_advantages(
        scored, section, own, penalties if section.kl_coef else {}, values, SINGLE
    )


UP = 0.5 / math.sqrt(1 / 3)  # mean 1/2, squared deviations 4 x 1/4
FROM_PENALTY = whitened([0, 0, 1, -2], -1 / 4)  # returns 1-1, 1-1, 1-0 and 0-2
DISCOUNTED = whitened([1 / 4, 1 / 2, 1, 0], 7 / 16)
BASELINE = whitened([1 / 2, 1 / 2, 1 / 2, -1 / 2, 0, 0], 1 / 6)


@pytest.mark.parametrize(
    ("kind", "rewards", "options", "expected"),
    [
        ("grpo", GROUPS, {}, [UP] * 2 + [-UP] * 4 + [UP] + [0] * 5),
        ("dr_grpo", GROUPS, {}, [0.5] * 2 + [-0.5] * 4 + [0.5] + [0] * 5),
        # a response of 1 less the mean of the others: 1 - (0 + 0 + 1) / 3; one of 0: -(1 + 0 + 1) /
        # 3
        ("rloo", GROUPS, {}, [2 / 3] * 2 + [-2 / 3] * 4 + [2 / 3] + [0] * 5),
        *((kind, EQUAL, {}, [0] * 6) for kind in ("grpo", "dr_grpo", "rloo")),
        # a response's sum
        ("dr_grpo", [[[-0.25, 0.75], [0.0]]], {}, [0.25, 0.25, -0.25]),
        # tokens 1 1 1 0: mean 3/4, variance (3/16 + 9/16) / 3 = 1/4
        ("reinforce_plus_plus", TWO, {}, [0.5, 0.5, 0.5, -1.5]),
        ("reinforce_plus_plus", PENALIZED, {}, FROM_PENALTY),
        ("reinforce_plus_plus", TWO, {"gamma": 0.5}, DISCOUNTED),
        ("reinforce_plus_plus", [[[1.0]]], {}, [0]),
        ("reinforce_plus_plus_baseline", [[*TWO[0], [0.0]], [[0.0], [0.0]]], {}, BASELINE),
    ],
)
def test_advantages_of_all_tokens_by_hand(
    kind: str, rewards: list, options: dict[str, float], expected: list[float]
) -> None:
    """Where it is 0 it is exactly 0: such responses are skipped."""
    is_last = all(not any(response[:-1]) for group in rewards for response in group)
    for kl_coef in (0.0, 1.0) if is_last else (1.0,):
        section = AlgorithmSection(
            advantage=kind, kl_coef=kl_coef, kl_placement="reward", **options
        )
        found, _ = advantages_of(rewards, section)
        assert all(each.dtype == torch.float32 for each in found.values())
        tokens = [float(value) for each in found.values() for value in each]
        assert tokens == pytest.approx(expected, rel=1e-4, abs=0)


def test_gae_sums_the_discounted_errors_of_the_critic() -> None:
    values = {(0, 0): torch.tensor([0.5, 0.25, 0.75]), (1, 0): torch.tensor([0.0])}
    section = AlgorithmSection(advantage="gae", gamma=0.5, lam=0.5)
    advantages, returns = advantages_of([[[0.0, 0.0, 1.0]], [[-1.0]]], section, values)
    assert returns is not None
    # errors: 0 + 0.5 * 0.25 - 0.5 = -0.375, 0 + 0.5 * 0.75 - 0.25 = 0.125, 1 - 0.75 = 0.25
    # advantages: 0.25, 0.125 + 0.25 * 0.25 = 0.1875, -0.375 + 0.25 * 0.1875 = -0.328125; and -1
    raw = torch.tensor([-0.328125, 0.1875, 0.25, -1.0])
    assert torch.equal(returns[0, 0], torch.tensor([0.171875, 0.4375, 1.0]))
    assert torch.equal(returns[1, 0], torch.tensor([-1.0]))
    # mean -57/256, so in 256ths the differences are -27, 105, 121, -199
    std = math.sqrt((27**2 + 105**2 + 121**2 + 199**2) / 3) / 256
    expected = torch.tensor([-27.0, 105.0, 121.0, -199.0]) / 256 / std
    assert torch.allclose(raw - raw.mean(), expected * std)
    assert torch.allclose(torch.cat([advantages[0, 0], advantages[1, 0]]), expected, atol=1e-5)
    assert advantages[0, 0].dtype == returns[0, 0].dtype == torch.float32
