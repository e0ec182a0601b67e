"""The critic of PPO: values of the responses, and its own updates. The policy trainer calls it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tlt_megatron.config.schema import CriticSection
from tlt_megatron.policy.advantages import gather_statistics
from tlt_megatron.policy.health import UpdateHealth
from tlt_megatron.policy.interfaces import CriticModel
from tlt_megatron.runtime.collectives import sum_metrics
from tlt_megatron.runtime.process_groups import Group, ProcessGroups
from tlt_megatron.types import (
    LossResult,
    MicroBatch,
    OptimizerStats,
    Rollout,
    RolloutKey,
    TokenValues,
)

_VARIANCE_EPS = 1e-5  # verl's: explained variance stays finite where all returns are equal


@dataclass
class CriticTrainer:
    """A CriticModel with its settings. Every method is a collective of the model's ranks."""

    model: CriticModel
    section: CriticSection
    groups: ProcessGroups

    def __post_init__(self) -> None:
        self._health = UpdateHealth(updates="updates of the critic", advice="critic.lr")

    @property
    def is_last_update_good(self) -> bool:
        """Return whether the newest update was not skipped; True before the first update."""
        return self._health.num_bad == 0

    def update(self, step: int, minibatches: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """Run one optimizer step per mini-batch, of this rank's micro-batches; return metrics.

        UnhealthyTrainingError on all ranks after too many skipped updates.
        """
        totals: dict[str, float] = defaultdict(float)
        stats: list[OptimizerStats] = []
        loss_fn = partial(value_loss, cliprange_value=self.section.cliprange_value)
        for batches in minibatches:
            for name, value in self.model.forward_backward(batches, loss_fn).items():
                totals[name] += value
            stats.append(self.model.optimizer_step())
        sums = sum_metrics(totals, self.groups.dp)
        loss_count, num_tokens = sums.pop("loss_count"), sums.pop("num_tokens")
        loss = sums["vf_loss"] / max(loss_count, 1)  # 0: all are masked
        self._health.check_updates(step, stats, loss, self.groups.world)
        return {
            "critic/vf_loss": loss,
            "critic/vf_clipfrac": sums["vf_clipfrac"] / num_tokens,
            "critic/vpred_mean": sums["vpred"] / num_tokens,
            "critic/grad_norm": sum(each.grad_norm for each in stats) / len(stats),
            "critic/lr": stats[-1].lr,
            "critic/num_skipped_updates": float(sum(each.is_skipped for each in stats)),
        }


def value_loss(predicted: TokenValues, batch: MicroBatch, *, cliprange_value: float) -> LossResult:
    """Return the clipped squared error of the values, weighted as the policy loss.

    Per token 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), with V_old before the
    update (Schulman et al.'s PPO code; verl's `compute_value_loss`).
    """
    assert batch.critic is not None
    old_P, returns_P = batch.critic
    values_P = predicted.values
    clipped_P = values_P.clamp(old_P - cliprange_value, old_P + cliprange_value)
    plain_P = (values_P - returns_P).square()
    bounded_P = (clipped_P - returns_P).square()
    loss_sum = 0.5 * (torch.maximum(plain_P, bounded_P) * batch.loss_weights).sum()
    mask_P = batch.loss_mask
    metrics = {
        "vf_loss": loss_sum.detach(),
        "vf_clipfrac": ((bounded_P > plain_P) * mask_P).sum(),
        "vpred": (values_P.detach() * mask_P).sum(),
        "num_tokens": mask_P.sum(),
        "loss_count": torch.tensor(batch.loss_count),
    }
    return LossResult(loss_sum=loss_sum, count=batch.loss_count, metrics=metrics)


def value_metrics(
    own: Sequence[Rollout],
    values: Mapping[RolloutKey, Tensor],
    returns: Mapping[RolloutKey, Tensor],
    dp: Group,
) -> dict[str, float]:
    """Return statistics of the values [T] over all tokens of the policy in a batch, of which this
    rank has those of `own`. A collective of the data-parallel ranks.
    """
    errors = {key: returns[key].double() - values[key] for key in values}
    found, error, target = gather_statistics(own, [values, errors, returns], dp)
    explained = 1 - error.variance / (target.variance + _VARIANCE_EPS)
    return found.metrics("critic/values") | {"critic/vf_explained_var": explained}
