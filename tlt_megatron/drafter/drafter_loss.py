"""Training objectives of the drafter: EAGLE, HASS and EAGLE-3 as settings of one unrolled pass.

At unroll step k > 0 the drafter reads its own output of step k - 1 as features, as in the engine k
tokens after the last verified one. The tokens are always those of the sequence.
- EAGLE (arXiv 2401.15077, section 3.2): one step, with a feature loss.
- HASS (arXiv 2408.15766, section 3.2): several steps, with own features detached.
- EAGLE-3 (arXiv 2503.01840, section 3.1): several steps with gradients, and no feature loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.packing import DraftBatch
from tlt_megatron.models.attention.packed import UnrolledAttention
from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.draft_model import DraftModel

HEAD_CHUNK_TOKENS = 512  # rows whose vocabulary-sized logits are held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """loss = sum over steps of decay^k * (soft cross entropy + feature_weight * smooth L1)."""

    num_steps: int
    feature_weight: float
    decay: float
    has_detached_steps: bool  # no gradients through the drafter's own features


def make_objective(section: DrafterSection) -> Objective:
    """Return the objective of `drafter.algorithm`, with the weights of its paper."""
    return Objective(
        num_steps={"eagle": 1, "hass": 3, "eagle3": 5}[section.algorithm],
        # The output of EAGLE-3 is not a feature of the target.
        feature_weight=0.0 if section.algorithm == "eagle3" else section.feature_weight,
        decay=0.8,
        has_detached_steps=section.algorithm == "hass",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoss:
    """A loss as sum and count, and sums by unroll step to divide by `counts_K`."""

    loss_sum: Tensor  # scalar, differentiable; all sums are float32 (float64 for a float64 model)
    count: int  # trained rows; training minimizes loss_sum / count, both summed over ranks
    counts_K: Tensor  # rows that have a prediction at this step
    agreed_K: Tensor  # rows whose most likely token is the target's
    # Summed overlap of both distributions, sum_v min(p, q): the probability that one drafted token
    # is accepted at temperature 1 with rejection sampling. Verification by shared noise accepts
    # slightly less.
    accepted_K: Tensor


def draft_loss(
    model: DraftModel,
    batch: DraftBatch,
    objective: Objective,
    *,
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS,
    between_chunks: Callable[[], None] = lambda: None,
) -> DraftLoss:
    """Return the loss of the unrolled drafter. Logits exist for `head_chunk_tokens` rows.

    `between_chunks` is called after the rows of each chunk; it may raise to abandon the pass.
    """
    outputs_PD, head_inputs_PD = unroll_draft(model, batch, objective)
    targets_M = batch.loss_mask.nonzero().squeeze(-1)  # rows whose next token is predicted
    steps_K = torch.arange(objective.num_steps, device=targets_M.device)
    # Row s at step k is predicted by row s - k, if that row is in the same sequence.
    is_drafted_KM = batch.position_ids[targets_M] >= steps_K.unsqueeze(1)
    sources_KM = (targets_M - steps_K.unsqueeze(1)).clamp(min=0)
    wide = wide_dtype(head_inputs_PD[0].dtype)
    weights_KM = is_drafted_KM.to(wide) * (objective.decay ** steps_K.to(wide)).unsqueeze(1)
    head_KMD = torch.stack(
        [x.index_select(0, rows) for x, rows in zip(head_inputs_PD, sources_KM, strict=True)]
    )
    target_MD = batch.target_hidden.index_select(0, targets_M)
    loss_sum, agreed_K, accepted_K = _HeadLoss.apply(
        head_KMD, target_MD, model.lm_head_VD, weights_KM, head_chunk_tokens, between_chunks
    )
    if objective.feature_weight > 0:
        for output_PD, rows, weights_M in zip(outputs_PD, sources_KM, weights_KM, strict=True):
            predicted_MD = output_PD.index_select(0, rows).to(wide)
            distance_MD = F.smooth_l1_loss(predicted_MD, target_MD.to(wide), reduction="none")
            distance = (distance_MD.mean(dim=-1) * weights_M).sum()
            loss_sum = loss_sum + objective.feature_weight * distance
    return DraftLoss(
        loss_sum=loss_sum,
        count=targets_M.numel(),
        counts_K=is_drafted_KM.sum(dim=1, dtype=wide),
        agreed_K=agreed_K,
        accepted_K=accepted_K,
    )


def unroll_draft(
    model: DraftModel, batch: DraftBatch, objective: Objective
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and head inputs [P, D] by step. Row t at step k predicts token t + 2 + k.

    Rows past the end of their sequence hold unused values: rows attend to themselves and earlier.
    """
    longest = max(batch.lengths)
    model.rotary.reserve(longest + objective.num_steps)
    attention = UnrolledAttention(batch.lengths)
    hidden_PD = model.fuse(batch.features)
    outputs, head_inputs = [], []
    for step in range(objective.num_steps):
        # Step k reads the sequence's own token at the position that step k-1 predicted.
        token_ids_P = batch.token_ids if step == 0 else batch.labels.roll(1 - step)
        output_PD, head_PD = model(token_ids_P, hidden_PD, batch.position_ids + step, attention)
        outputs.append(output_PD)
        head_inputs.append(head_PD)
        hidden_PD = output_PD.detach() if objective.has_detached_steps else output_PD
    return outputs, head_inputs


class _HeadLoss(torch.autograd.Function):
    """Weighted soft cross entropy through the frozen head, in chunks of rows.

    The head needs no gradient, so the forward pass also computes the gradient of the inputs, chunk
    by chunk. The target's distribution of a row is computed once for all steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head_KMD: Tensor,
        target_MD: Tensor,
        lm_head_VD: Tensor,
        weights_KM: Tensor,
        chunk_tokens: int,
        between_chunks: Callable[[], None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_steps, num_rows, _ = head_KMD.shape
        accumulate = wide_dtype(head_KMD.dtype)
        totals = torch.zeros(3, num_steps, dtype=accumulate, device=head_KMD.device)
        grad_KMD = torch.empty_like(head_KMD)
        for start in range(0, num_rows, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            p_CV = F.linear(target_MD[rows].to(lm_head_VD.dtype), lm_head_VD).to(accumulate)
            p_CV = p_CV.softmax(dim=-1)
            best_C = p_CV.argmax(dim=-1)
            for step in range(num_steps):
                weights_C = weights_KM[step, rows]
                is_drafted_C = (weights_C > 0).to(accumulate)
                logits_CV = F.linear(head_KMD[step, rows].to(lm_head_VD.dtype), lm_head_VD)
                logq_CV = logits_CV.to(accumulate).log_softmax(dim=-1)
                totals[0, step] -= (p_CV * logq_CV).sum(dim=-1) @ weights_C
                totals[1, step] += (logq_CV.argmax(dim=-1) == best_C).to(accumulate) @ is_drafted_C
                q_CV = logq_CV.exp_()
                totals[2, step] += torch.minimum(p_CV, q_CV).sum(dim=-1) @ is_drafted_C
                if not ctx.needs_input_grad[0]:
                    continue
                grad_CV = q_CV.sub_(p_CV).mul_(weights_C.unsqueeze(-1)).to(lm_head_VD.dtype)
                grad_KMD[step, rows] = (grad_CV @ lm_head_VD).to(grad_KMD.dtype)
            between_chunks()
        ctx.save_for_backward(grad_KMD)
        loss_sum, agreed_K, accepted_K = totals[0].sum(), totals[1], totals[2]
        ctx.mark_non_differentiable(agreed_K, accepted_K)
        return loss_sum, agreed_K, accepted_K

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad_KMD,) = ctx.saved_tensors
        return grad_KMD * grad.to(grad_KMD.dtype), None, None, None, None, None
