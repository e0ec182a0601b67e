"""The policy loss of one micro-batch. The schedule calls it on the last stage.

`ppo`, `gspo` and `cispo` are the choices of `algorithm.loss`. Each returns the policy-gradient term
of every token, and where a clip decided it. `policy_loss` adds what all have in common: the
correction for the rollout engine, KL, entropy, aggregation and metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from tlt_megatron.config.extensions import call_extension, load_extension, shapes_of
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.correction import MAX_LOG_RATIO, correction_weights, response_mean
from tlt_megatron.types import LossResult, MicroBatch, TokenLogprobs

Loss = TypeVar("Loss", bound=Callable[..., tuple[Tensor, Tensor]])


def policy_loss(
    predicted: TokenLogprobs, batch: MicroBatch, section: AlgorithmSection
) -> LossResult:
    """Return the weighted sum over the tokens and its `count`.

    The gradient is that of the sum over all ranks, divided by the summed count.

    Per token: the policy-gradient term of `section.loss`

    - times a constant weight that corrects for the rollout engine (correction.py);
    - plus kl_coef * KL(policy, reference), minus entropy_coef * entropy.

    ValueError if the function of `section.loss` does not return two tensors [P].
    """
    mask_P = batch.loss_mask
    old_P = batch.old_logprobs
    if old_P is None:  # rollouts come from the policy that is updated: every ratio is 1
        old_P = predicted.logprobs.detach()
    if section.is_sft:
        terms = -predicted.logprobs, torch.zeros_like(mask_P)
    else:
        terms = call_extension(
            "algorithm.loss",
            section.loss,
            logprobs=predicted.logprobs,
            old_logprobs=old_P,
            batch=batch,
            section=section,
            **section.loss_args,
        )
    if shapes_of(terms) != [list(mask_P.shape)] * 2:
        raise ValueError(
            f"algorithm.loss={section.loss!r}: returned {shapes_of(terms)}, must be two tensors of {list(mask_P.shape)}"
        )
    term_P, is_clipped_P = terms
    metrics = {
        "pg_clipfrac": (is_clipped_P.detach() * mask_P).sum(),
        "ppo_kl": ((old_P - predicted.logprobs.detach()) * mask_P).sum(),
        "entropy": (predicted.entropy.detach() * mask_P).sum(),
    }
    if section.is_sft:
        metrics["sft/loss"] = -(predicted.logprobs.detach() * mask_P).sum()
    if section.dual_clip and section.loss == "ppo":
        ratio_P = (predicted.logprobs.detach() - old_P).exp()
        is_bounded_P = (batch.advantages < 0) & (ratio_P > section.dual_clip)
        metrics["pg_clipfrac_lower"] = (is_bounded_P * mask_P).sum()
    if section.has_correction:
        weight_P, found = correction_weights(old_P, batch, section)
        metrics |= found
        term_P = term_P * weight_P
    loss_P = term_P - section.entropy_coef * predicted.entropy
    if section.kl_coef and section.kl_placement == "loss":
        assert batch.ref_logprobs is not None
        estimator = section.used_kl_estimator
        kl_P = kl_estimate(estimator, predicted.logprobs, batch.ref_logprobs) * mask_P
        metrics["kl_loss"] = kl_P.detach().sum()
        loss_P = loss_P + section.kl_coef * kl_P
    metrics["pg_loss"] = (term_P.detach() * batch.loss_weights).sum()
    return LossResult(
        loss_sum=(loss_P * batch.loss_weights).sum(), count=batch.loss_count, metrics=metrics
    )


def zero_without_advantage(loss: Loss) -> Loss:
    """State of a loss that a token of advantage 0 has no gradient in it.

    The update then skips responses of zero advantage. A user's loss may have this decorator too.
    """
    vars(loss)["is_zero_without_advantage"] = True
    return loss


def is_zero_without_advantage(spec: str) -> bool:
    """Return whether the loss that `algorithm.loss` names states it."""
    return getattr(load_extension("algorithm.loss", spec), "is_zero_without_advantage", False)


@zero_without_advantage
def ppo(
    logprobs: Tensor, old_logprobs: Tensor, batch: MicroBatch, section: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of the ratio of each token."""
    log_ratio_P = (logprobs - old_logprobs) * batch.loss_mask
    return clipped_surrogate(
        log_ratio_P, batch.advantages, section.clip_low, section.clip_high, section.dual_clip
    )


@zero_without_advantage
def gspo(
    logprobs: Tensor, old_logprobs: Tensor, batch: MicroBatch, section: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of the ratio of each response (Zheng et al. 2025, arXiv 2507.18071, eq.
    5-7).

    The ratio is the geometric mean over the T tokens of a response, s = exp(sum of log-ratios / T).
    The gradient goes through the token's own log-prob (eq. 14, GSPO-token), which gives eq. 5's
    gradient where all tokens have one advantage.
    """
    mean_P = response_mean((logprobs - old_logprobs).detach(), batch)
    own_P = (logprobs - logprobs.detach()) * batch.loss_mask  # zero; carries the gradient
    return clipped_surrogate(mean_P + own_P, batch.advantages, section.clip_low, section.clip_high)


@zero_without_advantage
def cispo(
    logprobs: Tensor, old_logprobs: Tensor, batch: MicroBatch, section: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """-clip(ratio) * A * logprob, with a constant ratio (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    A clipped token keeps its gradient. The paper sets no lower bound: clip_low=1.
    """
    log_ratio_P = (logprobs - old_logprobs).detach() * batch.loss_mask
    ratio_P = log_ratio_P.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_P = ratio_P.clamp(1 - section.clip_low, 1 + section.clip_high)
    return -clipped_P * batch.advantages * logprobs, (clipped_P != ratio_P).float()


def clipped_surrogate(
    log_ratio_P: Tensor,
    advantages_P: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the surrogate loss of each token [P] and whether a clip decided it [P].

    - -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (Schulman et al. 2017, eq. 7;
      two clip bounds: DAPO, Yu et al. 2025, eq. 8);
    - dual clip, where A < 0: at most -dual_clip * A (Ye et al. 2020, eq. 5).
    """
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


def kl_estimate(estimator: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) per token, from tokens of the policy.

    Schulman 2020, "Approximating KL divergence": k1 = log p/q, k2 = (log p/q)^2 / 2, k3 = q/p - 1 -
    log q/p. As a loss, k2 and k3 pull towards the reference, and the gradient of k1 is zero on
    average. As a reward, k1 has the gradient of KL, and those of k2 and k3 vanish near the
    reference.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return (-log_ratio).clamp(max=MAX_LOG_RATIO).exp() - 1 + log_ratio
