"""The loss against values worked out by hand, and its gradient where clipping must stop it."""

from __future__ import annotations

import math

import pytest
import torch

from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.loss import (
    PolicyLoss,
    clipped_surrogate,
    kl_estimate,
    truncated_importance,
)
from tlt_megatron.types import MicroBatch, TokenLogprobs


def micro_batch(advantages: list[float], mask: list[float], weights: list[float], **fields: object):
    size = len(mask)
    defaults = {
        "old_logprobs": torch.full((size,), -1.0),
        "rollout_logprobs": torch.full((size,), -1.0),
        "loss_count": int(sum(mask)),
    }
    return MicroBatch(
        token_ids=torch.zeros(size, dtype=torch.int64),
        labels=torch.zeros(size, dtype=torch.int64),
        position_ids=torch.arange(size),
        cu_seqlens=torch.tensor([0, size], dtype=torch.int32),
        loss_mask=torch.tensor(mask),
        loss_weights=torch.tensor(weights),
        advantages=torch.tensor(advantages),
        **{**defaults, **fields},
    )


def predicted(logprobs: list[float]) -> TokenLogprobs:
    values = torch.tensor(logprobs, requires_grad=True)
    return TokenLogprobs(
        logprobs=values, entropy=torch.full_like(values, 0.5).detach(), policy_logprobs=values
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.5, 1.0, -1.28, 1.0),  # too far up: capped at 1 + clip_high
        (0.5, 1.0, -0.5, 0.0),  # a fall may be undone
        (0.5, -1.0, 0.8, 1.0),  # too far down: held at 1 - clip_low
        (1.5, -1.0, 1.5, 0.0),
        (5.0, -1.0, 3.0, 1.0),  # dual clip
    ],
)
def test_clipped_surrogate_by_hand(
    ratio: float, advantage: float, loss: float, is_clipped: float
) -> None:
    loss_P, clipped_P = clipped_surrogate(
        torch.tensor([math.log(ratio)]), torch.tensor([advantage]), 0.2, 0.28, dual_clip=3.0
    )
    assert float(loss_P) == pytest.approx(loss, rel=1e-5)
    assert float(clipped_P) == is_clipped


def test_a_clipped_token_has_no_gradient_and_an_unmasked_one_none_either() -> None:
    output = predicted([-1.0 + math.log(1.5), -1.0, -0.3])
    batch = micro_batch([1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0])
    result = PolicyLoss(AlgorithmSection(clip_low=0.2, clip_high=0.2))(output, batch)
    result.loss_sum.backward()
    assert output.logprobs.grad.tolist() == pytest.approx([0.0, -1.0, 0.0])
    assert result.count == 2
    assert float(result.metrics["pg_clipfrac"]) == 1.0


def test_kl_estimators_by_hand() -> None:
    logprobs, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert float(kl_estimate("k1", logprobs, reference)) == pytest.approx(math.log(2))
    assert float(kl_estimate("k2", logprobs, reference)) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(kl_estimate("k3", logprobs, reference)) == pytest.approx(0.5 - 1 + math.log(2))


def test_k1_and_k3_average_to_the_divergence() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    exact = float((policy * (policy / reference).log()).sum())
    for estimator in ("k1", "k3"):
        mean = float((policy * kl_estimate(estimator, policy.log(), reference.log())).sum())
        assert mean == pytest.approx(exact, rel=1e-5)


def test_kl_loss_adds_its_coefficient_times_the_estimate() -> None:
    section = AlgorithmSection(kl_coef=0.1, kl_estimator="k2")
    batch = micro_batch([0.0], [1.0], [1.0], ref_logprobs=torch.tensor([-2.0]))
    result = PolicyLoss(section)(predicted([-1.0]), batch)
    assert float(result.loss_sum) == pytest.approx(0.1 * 0.5)
    assert float(result.metrics["kl_loss"]) == pytest.approx(0.5)


def test_truncated_importance_caps_from_above_only() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0])
    rollout = torch.tensor([-1.0, -3.0, -0.5])
    expected = [1.0, 2.0, math.exp(-0.5)]
    assert truncated_importance(old, rollout, 2.0).tolist() == pytest.approx(expected)


def test_importance_weight_scales_the_surrogate() -> None:
    batch = micro_batch([1.0], [1.0], [1.0], rollout_logprobs=torch.tensor([-0.5]))
    result = PolicyLoss(AlgorithmSection(tis_cap=2.0))(predicted([-1.0]), batch)
    assert float(result.loss_sum) == pytest.approx(-math.exp(-0.5))


def test_entropy_bonus_lowers_the_loss() -> None:
    result = PolicyLoss(AlgorithmSection(entropy_coef=0.2))(
        predicted([-1.0]), micro_batch([0.0], [1.0], [1.0])
    )
    assert float(result.loss_sum) == pytest.approx(-0.2 * 0.5)


@pytest.mark.parametrize(
    "options", [{}, {"tis_cap": 2.0}, {"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_placement": "reward"}]
)
def test_metric_names_are_the_metrics(options: dict) -> None:
    loss = PolicyLoss(AlgorithmSection(**options))
    batch = micro_batch([1.0], [1.0], [1.0], ref_logprobs=torch.tensor([-2.0]))
    assert set(loss(predicted([-1.0]), batch).metrics) == set(loss.metric_names)
