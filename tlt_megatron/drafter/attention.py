"""Attention of the drafter over a packed batch and the steps of an unrolled draft.

`loss.py` creates it for each batch and passes it to `DraftModel.forward`. Row t at step k is the draft's k-th token after
position t. It attends to the same entries as in the engine's KV cache at that point:
- the pairs with true features at positions 0..t of its own sequence: keys of step 0;
- the pairs that this draft made at t+1..t+k: keys of the same row of steps 1..k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_QUERY_CHUNK = 512  # queries per block of scores, without a fused kernel that gives the log-sum


class UnrolledAttention:
    """Implements `transformer.Attention`. The k-th call of `attend`, from 0, is step k. Use one object per unrolled pass."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._steps: list[Tensor] = []  # kv_PKH of each step

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """See `transformer.Attention`. Differentiable in the queries, and in the keys and values of all steps."""
        assert layer == 0, "a drafter has one layer"
        self._steps.append(kv_PKH)
        out_PNH = _UnrolledAttend.apply(self._lengths, query_PNH, *self._steps)
        return out_PNH.flatten(1)


class _UnrolledAttend(torch.autograd.Function):
    """Causal attention per sequence over the keys of step 0, merged by log-sum with one key per later step.

    The backward of each part uses the output and the log-sum of the whole softmax, as in FlashAttention-2 (Dao 2023)
    and ring attention. The score matrix is never stored.
    """

    @staticmethod
    def forward(ctx: Any, lengths: tuple[int, ...], query_PNH: Tensor, *steps: Tensor) -> Tensor:
        num_kv_heads = steps[0].shape[1] // 2
        repeat = query_PNH.shape[1] // num_kv_heads
        outs, lses = [], []
        for q, kv in zip(query_PNH.split(lengths), steps[0].split(lengths), strict=True):
            out, lse = _causal_forward(*_per_head(q, kv, repeat))
            outs.append(out.squeeze(0).transpose(0, 1))
            lses.append(lse.squeeze(0).t())
        out_PNH, lse_PN = torch.cat(outs), torch.cat(lses)
        if len(steps) > 1:
            scores = [_own_scores(query_PNH, kv, repeat) for kv in steps[1:]]
            merged_PN = torch.logsumexp(torch.stack([lse_PN, *scores]), dim=0)
            total = out_PNH * (lse_PN - merged_PN).exp().unsqueeze(-1)
            for score_PN, kv in zip(scores, steps[1:], strict=True):
                value_PNH = kv[:, num_kv_heads:].repeat_interleave(repeat, dim=1)
                total += (score_PN - merged_PN).exp().unsqueeze(-1) * value_PNH
            out_PNH, lse_PN = total.to(query_PNH.dtype), merged_PN
        ctx.lengths, ctx.repeat = lengths, repeat
        ctx.save_for_backward(query_PNH, out_PNH, lse_PN, *steps)
        return out_PNH

    @staticmethod
    def backward(ctx: Any, grad_PNH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query_PNH, out_PNH, lse_PN, *steps = ctx.saved_tensors
        lengths, repeat = ctx.lengths, ctx.repeat
        grad_PNH = grad_PNH.contiguous()
        grad_queries, grad_kvs = [], []
        parts = (x.split(lengths) for x in (query_PNH, steps[0], grad_PNH, out_PNH, lse_PN))
        for q, kv, grad, out, lse in zip(*parts, strict=True):
            query, key, value = _per_head(q, kv, repeat)
            grads = _causal_backward(
                _heads_first(grad), query, key, value, _heads_first(out), lse.t().unsqueeze(0)
            )
            grad_q, grad_k, grad_v = (g.squeeze(0).transpose(0, 1) for g in grads)
            grad_queries.append(grad_q)
            grad_kvs.append(_sum_group(torch.cat((grad_k, grad_v), dim=1), repeat))
        grad_query_PNH = torch.cat(grad_queries)
        grad_steps = [torch.cat(grad_kvs)]
        delta_PN = (grad_PNH * out_PNH).sum(dim=-1, dtype=lse_PN.dtype)
        scale = query_PNH.shape[-1] ** -0.5
        for kv in steps[1:]:
            key_PNH, value_PNH = kv.repeat_interleave(repeat, dim=1).chunk(2, dim=1)
            weight_PN = (_own_scores(query_PNH, kv, repeat) - lse_PN).exp()
            grad_weight_PN = (grad_PNH * value_PNH).sum(dim=-1, dtype=lse_PN.dtype)
            grad_score = (weight_PN * (grad_weight_PN - delta_PN) * scale).unsqueeze(-1)
            grad_query_PNH = grad_query_PNH + (grad_score * key_PNH).to(query_PNH.dtype)
            grad_kv = torch.cat((grad_score * query_PNH, weight_PN.unsqueeze(-1) * grad_PNH), dim=1)
            grad_steps.append(_sum_group(grad_kv, repeat).to(kv.dtype))
        return None, grad_query_PNH, *grad_steps


def _heads_first(x_TNH: Tensor) -> Tensor:
    return x_TNH.transpose(0, 1).unsqueeze(0)


def _per_head(q_TNH: Tensor, kv_TKH: Tensor, repeat: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value, each [1, N, T, H]."""
    key, value = kv_TKH.chunk(2, dim=1)
    heads = (q_TNH, key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1))
    query, key, value = map(_heads_first, heads)
    return query, key, value


def _sum_group(grad_PNH: Tensor, repeat: int) -> Tensor:
    """Sum the gradients of repeated kv heads: [P, 2N, H] to [P, 2K, H]."""
    return grad_PNH.unflatten(1, (-1, repeat)).sum(dim=2)


def _own_scores(query_PNH: Tensor, kv_PKH: Tensor, repeat: int) -> Tensor:
    """Return the scaled scores [P, N] of each row's query with the same row's key, in float32 (float64 for float64)."""
    key_PNH = kv_PKH[:, : kv_PKH.shape[1] // 2].repeat_interleave(repeat, dim=1)
    accumulate = torch.float64 if query_PNH.dtype == torch.float64 else torch.float32
    return (query_PNH * key_PNH).sum(dim=-1, dtype=accumulate) * query_PNH.shape[-1] ** -0.5


def _causal_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [1, N, T, H] and log-sum [1, N, T] of causal attention."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True
        )
    return chunked_causal_forward(query, key, value)


def _causal_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, True
        )
    return chunked_causal_backward(grad, query, key, value, out, lse)


def _chunk_scores(query: Tensor, key: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    scores = (query[:, :, start:end] @ key[:, :, :end].transpose(-1, -2)).to(dtype)
    scores *= query.shape[-1] ** -0.5
    hidden = torch.ones(end - start, end, dtype=torch.bool, device=query.device).triu(start + 1)
    return scores.masked_fill_(hidden, -torch.inf)


def chunked_causal_forward(
    query: Tensor, key: Tensor, value: Tensor, chunk: int = _QUERY_CHUNK
) -> tuple[Tensor, Tensor]:
    """Causal attention in plain PyTorch, for devices whose fused kernels do not return the log-sum in every dtype."""
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    outs, lses = [], []
    for start in range(0, query.shape[2], chunk):
        end = min(start + chunk, query.shape[2])
        scores = _chunk_scores(query, key, start, end, accumulate)
        lse = scores.logsumexp(dim=-1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(value.dtype)
        outs.append(weights @ value[:, :, :end])
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def chunked_causal_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    chunk: int = _QUERY_CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value for one part of a softmax; `out` and `lse` are of the whole softmax."""
    grad_query = torch.empty_like(query)
    grad_key = torch.zeros_like(key, dtype=lse.dtype)
    grad_value = torch.zeros_like(value, dtype=lse.dtype)
    delta = (grad * out).sum(dim=-1, keepdim=True, dtype=lse.dtype)
    for start in range(0, query.shape[2], chunk):
        end = min(start + chunk, query.shape[2])
        rows = slice(start, end)
        scores = _chunk_scores(query, key, start, end, lse.dtype)
        weights = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        grad_weights = (grad[:, :, rows] @ value[:, :, :end].transpose(-1, -2)).to(lse.dtype)
        grad_scores = weights * grad_weights.sub_(delta[:, :, rows]) * query.shape[-1] ** -0.5
        grad_scores = grad_scores.to(query.dtype)
        grad_value[:, :, :end] += weights.to(grad.dtype).transpose(-1, -2) @ grad[:, :, rows]
        grad_key[:, :, :end] += grad_scores.transpose(-1, -2) @ query[:, :, rows]
        grad_query[:, :, rows] = grad_scores @ key[:, :, :end]
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)
