"""The policy-gradient loss of one micro-batch, with its shapes and sources. The schedule calls it on the last stage."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.interfaces import LossResult
from tlt_megatron.types import MicroBatch, TokenLogprobs

MAX_LOG_RATIO = 20.0  # keeps exp finite; such a ratio is clipped anyway


class PolicyLoss:
    """Clipped surrogate + KL + entropy, as a LossFunction.

    Per token, with ratio = exp(logprob - old_logprob) and advantage A (all [P]):

    - surrogate: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (Schulman et al. 2017, eq. 7;
      two clip bounds: DAPO, Yu et al. 2025, eq. 8);
    - dual clip, where A < 0: at most -dual_clip * A (Ye et al. 2020, eq. 5);
    - truncated importance sampling: times min(exp(old_logprob - rollout_logprob), tis_cap), a constant
      (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training");
    - plus kl_coef * KL(policy, reference), minus entropy_coef * entropy.
    """

    def __init__(self, section: AlgorithmSection) -> None:
        self.section = section

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the keys of `LossResult.metrics`. A rank without micro-batches needs them to take part in the sums."""
        names = ["pg_clipfrac", "ppo_kl", "entropy", "pg_loss"]
        if self.section.tis_cap:
            names.append("tis_weight")
        if self._has_kl_loss:
            names.append("kl_loss")
        return tuple(names)

    @property
    def _has_kl_loss(self) -> bool:
        return self.section.kl_coef > 0 and self.section.kl_placement == "loss"

    def __call__(self, predicted: TokenLogprobs, batch: MicroBatch) -> LossResult:
        """Return the weighted sum over the tokens and its `count`. The caller divides the sum over all ranks by the summed
        count.
        """
        section, mask_P = self.section, batch.loss_mask
        old_P = batch.old_logprobs
        if old_P is None:  # rollouts come from the policy that is updated: every ratio is 1
            old_P = predicted.logprobs.detach()
        log_ratio_P = (predicted.logprobs - old_P) * mask_P
        surrogate_P, is_clipped_P = clipped_surrogate(
            log_ratio_P, batch.advantages, section.clip_low, section.clip_high, section.dual_clip
        )
        metrics = {
            "pg_clipfrac": (is_clipped_P * mask_P).sum(),
            "ppo_kl": -log_ratio_P.detach().sum(),
            "entropy": (predicted.entropy.detach() * mask_P).sum(),
        }
        if section.tis_cap:
            weight_P = truncated_importance(old_P, batch.rollout_logprobs, section.tis_cap)
            metrics["tis_weight"] = (weight_P * mask_P).sum()
            surrogate_P = surrogate_P * weight_P
        loss_P = surrogate_P - section.entropy_coef * predicted.entropy
        if self._has_kl_loss:
            assert batch.ref_logprobs is not None
            kl_P = (
                kl_estimate(section.kl_estimator, predicted.logprobs, batch.ref_logprobs) * mask_P
            )
            metrics["kl_loss"] = (kl_P.detach() * mask_P).sum()
            loss_P = loss_P + section.kl_coef * kl_P
        metrics["pg_loss"] = (surrogate_P.detach() * batch.loss_weights).sum()
        return LossResult(
            loss_sum=(loss_P * batch.loss_weights).sum(), count=batch.loss_count, metrics=metrics
        )


def clipped_surrogate(
    log_ratio_P: Tensor, advantages_P: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[Tensor, Tensor]:
    """Return the per-token surrogate loss [P] and whether a clip decided it [P]."""
    ratio_P = log_ratio_P.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_P = -ratio_P * advantages_P
    clipped_P = -ratio_P.clamp(1 - clip_low, 1 + clip_high) * advantages_P
    loss_P = torch.maximum(plain_P, clipped_P)
    is_clipped_P = (clipped_P > plain_P).float()
    if dual_clip:
        bound_P = -dual_clip * advantages_P
        is_bounded_P = (advantages_P < 0) & (loss_P > bound_P)
        loss_P = torch.where(is_bounded_P, bound_P, loss_P)
        is_clipped_P = torch.maximum(is_clipped_P, is_bounded_P.float())
    return loss_P, is_clipped_P.detach()


def truncated_importance(old_logprobs_P: Tensor, rollout_logprobs_P: Tensor, cap: float) -> Tensor:
    """Return min(pi_train / pi_rollout, cap) per token [P]."""
    log_ratio_P = (old_logprobs_P - rollout_logprobs_P).clamp(max=MAX_LOG_RATIO)
    return log_ratio_P.exp().clamp(max=cap)


def kl_estimate(estimator: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) per token, from tokens of the policy (Schulman 2020, "Approximating KL divergence").

    k1 = log p/q, k2 = (log p/q)^2 / 2, k3 = q/p - 1 - log q/p. As a loss, k2 and k3 pull towards the reference. The gradient of
    k1 is zero on average, so k1 belongs in the reward.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return (-log_ratio).clamp(max=MAX_LOG_RATIO).exp() - 1 + log_ratio
    raise ValueError(f"kl_estimator={estimator!r}: must be one of k1, k2, k3")
