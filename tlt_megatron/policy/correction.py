"""Weights that correct the policy gradient for rollouts of another distribution than the one
trained. `policy_loss` calls it.

The distribution differs because the rollout engine computes with other kernels or another
precision, or cuts the distribution by top-p or top-k. The ratio is exp(old_logprob -
rollout_logprob), at one of three levels: of the token, of the response (the product over its
tokens) or geometric (their geometric mean). Names follow verl's `rollout_corr_helper.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_megatron.config.policy_sections import AlgorithmSection
from tlt_megatron.types import MicroBatch

MAX_LOG_RATIO = 20.0  # keeps exp finite


def correction_weights(
    old_logprobs: Tensor, batch: MicroBatch, section: AlgorithmSection
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weight of each token [P] in the policy gradient, a constant, and its metrics,
    summed over tokens.

    - `tis_cap`: min(ratio, tis_cap), truncated importance sampling (Yao et al. 2025, "Your
      efficient RL framework secretly brings you off-policy RL training"), at the level
      `rollout_is`;
    - `rollout_rs`: 0 where the ratio is outside its bounds. With `tis_cap` at the upper bound it is
      masked importance sampling (of responses: Liu et al. 2025, "When speed kills stability"; of
      tokens: IcePop, arXiv 2510.18855).
    """
    mask_P = batch.loss_mask
    log_ratio_P = (old_logprobs - batch.rollout_logprobs) * mask_P
    weight_P = torch.ones_like(mask_P)
    metrics = {}
    if section.tis_cap:
        ratio_P = _ratio(log_ratio_P, batch, section.rollout_is)
        weight_P = ratio_P.clamp(max=section.tis_cap)
        metrics["tis_weight"] = (weight_P * mask_P).sum()
        is_cut_P = ratio_P > section.tis_cap
        metrics["rollout_corr/rollout_is_ratio_fraction_high"] = (is_cut_P * mask_P).sum()
    if section.rollout_rs != "none":
        ratio_P = _ratio(log_ratio_P, batch, section.rollout_rs)
        low, high = section.rollout_rs_bounds
        is_kept_P = (ratio_P >= low) & (ratio_P <= high)
        weight_P = weight_P * is_kept_P
        metrics["rollout_corr/rollout_rs_masked_fraction"] = (~is_kept_P * mask_P).sum()
    return weight_P, metrics


def response_sum(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return for each token the sum of `values` [P] over the tokens of its response, [P]."""
    lengths_B = batch.cu_seqlens.diff().long()
    sums_B = torch.segment_reduce(values * batch.loss_mask, "sum", lengths=lengths_B)
    return sums_B.repeat_interleave(lengths_B)


def response_mean(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return for each token the mean of `values` [P] over the tokens of its response, [P]."""
    return response_sum(values, batch) / response_sum(batch.loss_mask, batch).clamp(min=1)


def _ratio(log_ratio_P: Tensor, batch: MicroBatch, level: str) -> Tensor:
    if level == "sequence":
        log_ratio_P = response_sum(log_ratio_P, batch)
    elif level == "geometric":
        log_ratio_P = response_mean(log_ratio_P, batch)
    return log_ratio_P.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
