"""Log-probabilities and entropy of labels from logits whose vocabulary is split over the
tensor-parallel ranks.

The ranks exchange one maximum and a few sums per token. The only large tensors are the logits and,
in the backward pass, their gradient. Float32 work is done in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.types import KeptTokens, TokenLogprobs

_BLOCK_ELEMENTS = 1 << 24  # float32 logits held at once: 64 MiB
_CUT = -1e30  # in place of -inf, which gives NaN when it is multiplied by its probability 0


def vocab_parallel_logprobs(
    logits_PV: Tensor,
    labels_P: Tensor,
    temperature: float,
    tp: Group,
    kept: KeptTokens | None = None,
) -> TokenLogprobs:
    """Return log-probs and entropy of `labels_P`, given this rank's shard of the vocabulary dim of
    the logits.

    Every member of `tp` must call it. All get the same result, differentiable in the logits except
    for the log-probs of the raw policy. Labels are ids of the whole vocabulary. If a label is
    unused (the end of a sequence), any valid id will do. With `kept`, log-probs and entropy are of
    the distribution over the kept tokens, to which a label must belong.
    """
    logprobs_P, entropy_P, policy_logprobs_P = _VocabParallelLogprobs.apply(
        logits_PV, labels_P, temperature, tp, kept
    )
    return TokenLogprobs(logprobs=logprobs_P, entropy=entropy_P, policy_logprobs=policy_logprobs_P)


class _VocabParallelLogprobs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z) over the kept tokens and entropy h:

    d log p(label) / d z_v = [v = label] - p_v,    d h / d z_v = -p_v (log p_v + h)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_PV: Tensor,
        labels_P: Tensor,
        temperature: float,
        tp: Group,
        kept: KeptTokens | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shard_size = logits_PV.size(-1)
        first_id = tp.rank * shard_size
        local_P = labels_P - first_id
        is_mine_P = (local_P >= 0) & (local_P < shard_size)
        local_P = local_P.clamp(0, shard_size - 1)

        max_P = logits_PV.amax(dim=-1).float()
        if tp.size > 1:
            dist.all_reduce(max_P, op=dist.ReduceOp.MAX, group=tp.of_torch)
        # rows: the label's logit, sum e^z, sum z e^z, sum e^logit; logits are relative to the
        # maximum
        sums_4P = torch.empty(4, labels_P.numel(), device=logits_PV.device)
        sums_4P[0] = logits_PV.gather(-1, local_P.unsqueeze(-1)).squeeze(-1).float() - max_P
        sums_4P[0] *= is_mine_P
        for rows in _row_blocks(logits_PV):
            z_PV = logits_PV[rows].float() - max_P[rows, None]
            if temperature != 1 or kept is not None:
                sums_4P[3, rows] = z_PV.exp().sum(dim=-1)
                z_PV /= temperature
            if kept is not None:
                _cut(z_PV, rows, kept, first_id)
            exp_PV = z_PV.exp()
            sums_4P[1, rows] = exp_PV.sum(dim=-1)
            sums_4P[2, rows] = exp_PV.mul_(z_PV).sum(dim=-1)
        if temperature == 1 and kept is None:
            sums_4P[3] = sums_4P[1]
        tp.all_reduce(sums_4P)

        label_P, sum_P, weighted_P, policy_sum_P = sums_4P
        sum_P.clamp_(min=torch.finfo(torch.float32).tiny)  # the kept tokens may lack the maximum
        log_sum_P = sum_P.log()
        entropy_P = log_sum_P - weighted_P / sum_P
        policy_P = label_P - policy_sum_P.log()
        ctx.temperature, ctx.kept, ctx.first_id = temperature, kept, first_id
        ctx.save_for_backward(logits_PV, local_P, is_mine_P, max_P, log_sum_P, entropy_P)
        ctx.mark_non_differentiable(policy_P)
        return label_P / temperature - log_sum_P, entropy_P, policy_P

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprobs_P: Tensor,
        grad_entropy_P: Tensor,
        _grad_policy_P: Tensor,
    ) -> tuple[Tensor, None, None, None, None]:
        logits_PV, local_P, is_mine_P, max_P, log_sum_P, entropy_P = ctx.saved_tensors
        temperature = ctx.temperature
        by_label_P = grad_logprobs_P / temperature
        by_entropy_P = grad_entropy_P / temperature

        grad_PV = torch.empty_like(logits_PV)
        for rows in _row_blocks(logits_PV):
            z_PV = logits_PV[rows].float() - max_P[rows, None]
            log_p_PV = z_PV.div_(temperature).sub_(log_sum_P[rows, None])
            if ctx.kept is not None:
                _cut(log_p_PV, rows, ctx.kept, ctx.first_id)
            factor_PV = by_label_P[rows, None] + by_entropy_P[rows, None] * (
                log_p_PV + entropy_P[rows, None]
            )
            block_PV = log_p_PV.exp_().mul_(factor_PV).neg_()
            block_PV.scatter_add_(1, local_P[rows, None], (by_label_P * is_mine_P)[rows, None])
            grad_PV[rows] = block_PV
        return grad_PV, None, None, None, None


def _cut(values_RV: Tensor, rows: slice, kept: KeptTokens, first_id: int) -> None:
    """Set what is not kept to _CUT, in the `rows` of this rank's shard, which starts at the token
    `first_id`.
    """
    ends_P = kept.counts.cumsum(0)
    counts_R = kept.counts[rows]
    start = int(ends_P[rows.start] - kept.counts[rows.start])
    ids_K = kept.token_ids[start : start + int(counts_R.sum())].long() - first_id
    rows_K = torch.arange(counts_R.numel(), device=ids_K.device).repeat_interleave(counts_R)
    is_mine_K = (ids_K >= 0) & (ids_K < values_RV.size(-1))
    is_cut_RV = (counts_R > 0).unsqueeze(1).repeat(1, values_RV.size(-1))
    is_cut_RV[rows_K[is_mine_K], ids_K[is_mine_K]] = False
    values_RV.masked_fill_(is_cut_RV, _CUT)


def _row_blocks(logits_PV: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK_ELEMENTS // logits_PV.size(-1))
    for start in range(0, logits_PV.size(0), rows):
        yield slice(start, start + rows)
