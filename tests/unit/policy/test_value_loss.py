"""The critic's loss and statistics against numbers worked out by hand, and the end of a run whose
critic does not learn.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.policy_batches import make_rollout, make_trainer
from tests.unit.policy.test_policy_trainer import FakeModel
from tlt_megatron.config.schema import AlgorithmSection, CriticSection
from tlt_megatron.policy.advantages import advantage_metrics
from tlt_megatron.policy.batching import attach_targets, pack_share
from tlt_megatron.policy.critic import CriticTrainer, value_loss, value_metrics
from tlt_megatron.policy.health import UnhealthyTrainingError
from tlt_megatron.runtime.process_groups import SINGLE, ProcessGroups
from tlt_megatron.types import (
    MicroBatch,
    OptimizerStats,
    Rollout,
    TokenValues,
)


def make_rollouts() -> list[Rollout]:
    """Responses of two tokens and of one, behind prompts of two and of one."""
    return [make_rollout((7,) * (2 - g), torch.tensor([3, 4][: 2 - g]), (0, g)) for g in range(2)]


def make_batch(aggregation: str) -> MicroBatch:
    targets = {
        "old_values": {(0, 0): torch.tensor([0.0, 1.0]), (0, 1): torch.tensor([0.5])},
        "returns": {(0, 0): torch.tensor([1.0, 1.0]), (0, 1): torch.tensor([0.0])},
    }
    (pack,) = pack_share(make_rollouts(), 1000)
    return attach_targets(pack, targets, AlgorithmSection(aggregation=aggregation), 8)


@pytest.mark.parametrize(
    ("aggregation", "loss_sum", "count"), [("token_mean", 0.505, 3), ("sequence_mean", 0.3425, 2)]
)
def test_value_loss_takes_the_larger_error_and_no_prompt(
    aggregation: str, loss_sum: float, count: int
) -> None:
    batch = make_batch(aggregation)
    # a value stands where its token is predicted; the others would change the loss
    values = torch.tensor([9.0, 0.5, 0.9, 9.0, 0.6, 9.0], requires_grad=True)[: batch.num_tokens]
    assert batch.critic is not None
    assert batch.critic.returns.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    result = value_loss(TokenValues(values=values), batch, cliprange_value=0.2)
    # squared errors: 0.5, with the value clipped to 0.2 0.8; 0.1; 0.6 -> 1/2 of 0.64, 0.01, 0.36
    assert float(result.loss_sum) == pytest.approx(loss_sum)
    assert result.count == count
    assert float(result.metrics["vf_clipfrac"]) == 1
    assert float(result.metrics["vpred"]) == pytest.approx(2.0)
    assert float(result.metrics["num_tokens"]) == 3
    (gradient,) = torch.autograd.grad(result.loss_sum, values)
    # a clipped token has no gradient
    weight = 1.0 if count == 3 else 0.5
    assert gradient.tolist() == pytest.approx([0.0, 0.0, -0.1 * weight, 0.0, 0.6, 0.0])


def test_statistics_of_values_and_returns() -> None:
    values = {(0, 0): torch.tensor([0.0, 1.0]), (0, 1): torch.tensor([2.0])}
    returns = {(0, 1): torch.tensor([3.0]), (0, 0): torch.tensor([0.0, 3.0])}
    own = make_rollouts()
    metrics = value_metrics(own, values, returns, SINGLE)
    metrics |= advantage_metrics(own, values, returns, SINGLE)
    assert metrics["critic/values/mean"] == 1.0
    assert (metrics["critic/values/min"], metrics["critic/values/max"]) == (0.0, 2.0)
    assert (metrics["critic/returns/mean"], metrics["critic/returns/max"]) == (2.0, 3.0)
    assert metrics["critic/advantages/max"] == 2.0
    # errors 0 2 1: variance 2/3; returns 0 3 3: variance 2
    assert metrics["critic/vf_explained_var"] == pytest.approx(2 / 3, abs=1e-5)


class BrokenCritic:
    """Its gradients are not finite in the updates listed."""

    def __init__(self, broken: set[int]) -> None:
        self.broken = broken
        self.num_updates = 0

    def forward_backward(self, batches: object, loss_fn: object) -> dict[str, float]:
        return dict.fromkeys(("vf_loss", "vf_clipfrac", "vpred", "num_tokens", "loss_count"), 1.0)

    def optimizer_step(self) -> OptimizerStats:
        self.num_updates += 1
        is_broken = self.num_updates in self.broken
        return OptimizerStats(
            grad_norm=math.nan if is_broken else 1.0, lr=0.1, is_skipped=is_broken
        )


def test_a_run_ends_after_skipped_updates_in_a_row() -> None:
    groups = ProcessGroups(world=SINGLE)
    model = BrokenCritic({1, 3, 4, 5})
    trainer = CriticTrainer(model, CriticSection(), groups)
    whole = make_trainer(FakeModel(), AlgorithmSection(advantage="gae"), critic=trainer)
    assert trainer.update(1, [[], []])["critic/num_skipped_updates"] == 1
    assert whole.is_last_update_good
    assert trainer.update(2, [[], []])["critic/num_skipped_updates"] == 2
    assert not whole.is_last_update_good  # so no checkpoint of it replaces the last good one
    with pytest.raises(UnhealthyTrainingError, match=r"step 3: 3 updates of the critic in a row"):
        trainer.update(3, [[]])
