"""Weights that correct for the rollout engine, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.policy_batches import make_packed
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.correction import correction_weights
from tlt_megatron.policy.policy_loss import policy_loss
from tlt_megatron.types import MicroBatch, TokenLogprobs

# Two responses of 2 and 3 tokens, each after a prompt token that is no label of the loss.
MASK = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
RATIOS = [9.0, 4.0, 1.0, 9.0, 0.5, 0.25, 1.0]  # products 4 and 1/8, geometric means 2 and 1/2


def batch() -> MicroBatch:
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    rollout_logprobs = -1.0 - torch.tensor(RATIOS).log()
    return make_packed(MASK, cu_seqlens=bounds, rollout_logprobs=rollout_logprobs)


def weights(**settings: object) -> tuple[list[float], dict[str, float]]:
    """The weights of the response tokens, and the metrics."""
    section = AlgorithmSection(**settings)  # type: ignore[arg-type]
    weight_P, metrics = correction_weights(torch.full((len(MASK),), -1.0), batch(), section)
    kept = [w for w, m in zip(weight_P.tolist(), MASK, strict=True) if m]
    return kept, {name.rpartition("/")[2]: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("level", "expected", "num_cut"),
    [
        ("token", [2.5, 1.0, 0.5, 0.25, 1.0], 1),
        ("sequence", [2.5, 2.5, 0.125, 0.125, 0.125], 2),
        ("geometric", [2.0, 2.0, 0.5, 0.5, 0.5], 0),
    ],
)
def test_truncated_importance_sampling(level: str, expected: list[float], num_cut: int) -> None:
    found, metrics = weights(tis_cap=2.5, rollout_is=level)
    assert found == pytest.approx(expected)
    assert metrics == pytest.approx(
        {"tis_weight": sum(expected), "rollout_is_ratio_fraction_high": num_cut}
    )


@pytest.mark.parametrize(
    ("level", "bounds", "expected"),
    [
        ("token", 2.0, [0, 1, 1, 0, 1]),  # kept in [1/2, 2]
        ("token", [0.3, 4.5], [1, 1, 1, 0, 1]),
        ("sequence", 5.0, [1, 1, 0, 0, 0]),  # 1/8 < 1/5
        ("sequence", [0.1, 5.0], [1, 1, 1, 1, 1]),
        ("geometric", 1.9, [0, 0, 0, 0, 0]),
        ("geometric", [0.4, 1.9], [0, 0, 1, 1, 1]),
    ],
)
def test_masked_importance_sampling(
    level: str, bounds: float | list[float], expected: list[float]
) -> None:
    found, metrics = weights(rollout_rs=level, rollout_rs_threshold=bounds)
    assert found == expected
    assert metrics == {"rollout_rs_masked_fraction": 5 - sum(expected)}


def test_all_together_multiply_in_the_loss_and_keep_the_divisor() -> None:
    section = AlgorithmSection(tis_cap=3.0, rollout_rs="geometric", rollout_rs_threshold=[0.6, 2.0])
    values = torch.full((len(MASK),), -1.0, requires_grad=True)
    predicted = TokenLogprobs(
        logprobs=values, entropy=torch.zeros(len(MASK)), policy_logprobs=values
    )
    result = policy_loss(predicted, batch(), section)
    assert result.count == 5
    result.loss_sum.backward()  # -ratio * advantage of PPO, where the PPO ratio is 1
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0, -3, -1, 0, 0, 0, 0])
    assert math.isclose(float(result.metrics["tis_weight"]), 3 + 1 + 0.5 + 0.25 + 1)
