"""Differentiable causal attention over packed sequences, and over the steps of an unrolled draft.

Keys are one per token, and optionally one more per token and later step of a draft, which only the
token's own query sees. The parts are merged by log-sum. The score matrix is never stored. Drafts
that branch, which have no gradients, have a class of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.models.attention.kernels import attend_with_lse, differentiate_causal
from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.runtime.device import has_loops


def attend_packed(
    query_PNH: Tensor,
    key_PKH: Tensor,
    value_PKH: Tensor,
    lengths: Sequence[int],
    scale: float | None = None,
) -> Tensor:
    """Return causal attention [P, N, H] within each of the sequences, `lengths` tokens each.

    A `scale` of None is 1 / sqrt(H). On a CPU bfloat16 is differentiated in float32: that rounds
    less, and the bfloat16 kernel has a fixed cost per call that dominates at about a hundred
    tokens.
    """
    scale = query_PNH.shape[-1] ** -0.5 if scale is None else scale
    return _PackedAttention.apply(list(lengths), scale, query_PNH, key_PKH, value_PKH)


class UnrolledAttention:
    """Attention of one unrolled draft. The k-th call of `attend`, from 0, is step k.

    Row t at step k is the draft's k-th token after position t. It attends to the same pairs as in
    the engine at that point: those with true features at positions 0..t of its sequence (keys of
    step 0), and those that this draft made at t+1..t+k (keys of the same row of steps 1..k).
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self.steps: list[Tensor] = []  # kv_PKH of each step

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """See `Attention`. Differentiable in queries, and in keys and values of all steps."""
        assert layer == 0, "a drafter has one layer"
        self.steps.append(kv_PKH)
        key, value = self.steps[0].chunk(2, dim=1)
        later = self.steps[1:]
        scale = query_PNH.shape[-1] ** -0.5
        out = _PackedAttention.apply(self._lengths, scale, query_PNH, key, value, *later)
        return out.flatten(1)


class BranchAttention:
    """Attention of drafts that branch off from packed tokens. Each call of `attend` is one depth.

    A draft attends to the tokens that its root sees and to its own ancestors.
    """

    def __init__(self, trunk_PKH: Tensor, is_seen_RP: Tensor) -> None:
        """`trunk_PKH` are keys and values of the tokens. `is_seen_RP` is for the R roots."""
        bias_RP = trunk_PKH.new_zeros(is_seen_RP.shape).masked_fill_(~is_seen_RP, -torch.inf)
        self._trunk, self._bias_RP = trunk_PKH, bias_RP
        self._ancestors: list[Tensor] = []  # kv_QKH of each depth above, for the current drafts

    def follow(self, parents_Q: Tensor) -> None:
        """Begin the next depth with one draft after each of these rows of the last one. At first
        they are rows of `is_seen_RP`.
        """
        self._bias_RP = self._bias_RP[parents_Q]
        self._ancestors = [kv_QKH[parents_Q] for kv_QKH in self._ancestors]

    def attend(self, layer: int, query_QNH: Tensor, kv_QKH: Tensor) -> Tensor:
        """See `Attention`."""
        assert layer == 0, "a drafter has one layer"
        self._ancestors.append(kv_QKH)
        repeat = 2 * query_QNH.shape[1] // kv_QKH.shape[1]
        key, value = (
            _for_queries(x, repeat).transpose(0, 1)[None] for x in self._trunk.chunk(2, dim=1)
        )
        query, bias = query_QNH.transpose(0, 1)[None], self._bias_RP[None, None]
        out_1NQH, lse_1NQ = attend_with_lse(query, key, value, bias)
        scale = query_QNH.shape[-1] ** -0.5
        own_QN = [_own_scores(query_QNH, kv, scale) for kv in self._ancestors]
        weights_MQN = torch.stack([lse_1NQ[0].t(), *own_QN]).softmax(dim=0).unsqueeze(-1)
        values = [_for_queries(kv.chunk(2, dim=1)[1], repeat) for kv in self._ancestors]
        parts_MQNH = torch.stack([out_1NQH[0].transpose(0, 1), *values])
        return (weights_MQN * parts_MQNH).sum(dim=0).to(query_QNH.dtype).flatten(1)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lengths: list[int],
        scale: float,
        query_PNH: Tensor,
        key_PKH: Tensor,
        value_PKH: Tensor,
        *later: Tensor,
    ) -> Tensor:
        attend, _ = _functions(query_PNH.device)
        out_PNH, lse_PN = attend(query_PNH, key_PKH, value_PKH, lengths, scale)
        if later:
            repeat = query_PNH.shape[1] // key_PKH.shape[1]
            scores = [_own_scores(query_PNH, kv, scale) for kv in later]
            merged_PN = torch.logsumexp(torch.stack([lse_PN, *scores]), dim=0)
            total = out_PNH * (lse_PN - merged_PN).exp().unsqueeze(-1)
            for score_PN, kv in zip(scores, later, strict=True):
                value = _for_queries(kv.chunk(2, dim=1)[1], repeat)
                total += (score_PN - merged_PN).exp().unsqueeze(-1) * value
            out_PNH, lse_PN = total.to(query_PNH.dtype), merged_PN
        ctx.lengths, ctx.scale = lengths, scale
        ctx.save_for_backward(lse_PN, query_PNH, key_PKH, value_PKH, out_PNH, *later)
        return out_PNH

    @staticmethod
    def backward(ctx: Any, grad_PNH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        lse_PN, *saved = ctx.saved_tensors
        dtype, scale = grad_PNH.dtype, ctx.scale
        if grad_PNH.is_cpu and dtype == torch.bfloat16:
            grad_PNH, *saved = (x.float() for x in (grad_PNH, *saved))
        query_PNH, key_PKH, value_PKH, out_PNH, *later = saved
        _, differentiate = _functions(grad_PNH.device)
        inputs = query_PNH, key_PKH, value_PKH, out_PNH, lse_PN
        grads = differentiate(grad_PNH, *inputs, ctx.lengths, scale)
        repeat = query_PNH.shape[1] // key_PKH.shape[1]
        delta_PN = (grad_PNH * out_PNH).sum(dim=-1, dtype=lse_PN.dtype) if later else lse_PN
        for kv in later:
            key, value = _for_queries(kv, repeat).chunk(2, dim=1)
            weight_PN = (_own_scores(query_PNH, kv, scale) - lse_PN).exp()
            grad_weight_PN = (grad_PNH * value).sum(dim=-1, dtype=lse_PN.dtype)
            grad_score = (weight_PN * (grad_weight_PN - delta_PN) * scale).unsqueeze(-1)
            grads[0] = grads[0] + (grad_score * key).to(query_PNH.dtype)
            grad_kv = torch.cat((grad_score * query_PNH, weight_PN.unsqueeze(-1) * grad_PNH), dim=1)
            grads.append(_sum_group(grad_kv, repeat))
        return None, None, *(grad.to(dtype) for grad in grads)


def _functions(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the attention of all sequences on a device, and its gradient."""
    if not has_loops(device):
        return _attend_each, _differentiate_each
    # Imported when needed: the installation may lack numba.
    from tlt_megatron.models.attention import causal_kernels

    return causal_kernels.attend_sequences, causal_kernels.differentiate_sequences


def _attend_each(
    query_PNH: Tensor, key_PKH: Tensor, value_PKH: Tensor, lengths: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """See `causal_kernels.attend_sequences`. Runs torch's operators for one sequence at a time."""
    repeat = query_PNH.shape[1] // key_PKH.shape[1]
    inputs = (query_PNH, _for_queries(key_PKH, repeat), _for_queries(value_PKH, repeat))
    out_PNH = torch.empty_like(query_PNH, memory_format=torch.contiguous_format)
    lses = []
    for *segment, out_1NTH in _segments((*inputs, out_PNH), lengths):
        attended, lse_1NT = attend_with_lse(*segment, is_causal=True, scale=scale)
        out_1NTH.copy_(attended)
        lses.append(lse_1NT)
    return out_PNH, torch.cat(lses, dim=2)[0].t()


def _differentiate_each(
    grad_PNH: Tensor,
    query_PNH: Tensor,
    key_PKH: Tensor,
    value_PKH: Tensor,
    out_PNH: Tensor,
    lse_PN: Tensor,
    lengths: list[int],
    scale: float,
) -> list[Tensor]:
    """See `causal_kernels.differentiate_sequences`. Runs torch's operators for one sequence at a
    time.
    """
    repeat = query_PNH.shape[1] // key_PKH.shape[1]
    key, value = _for_queries(key_PKH, repeat), _for_queries(value_PKH, repeat)
    inputs = (grad_PNH, query_PNH, key, value, out_PNH, lse_PN.unsqueeze(-1))
    parts = []
    for grad, query, key, value, out, lse_1NT1 in _segments(inputs, lengths):
        lse = lse_1NT1.squeeze(-1)
        found = differentiate_causal(grad, query, key, value, out, lse, scale=scale)
        parts.append([x_1NTH[0].transpose(0, 1) for x_1NTH in found])
    grad_query, grad_key, grad_value = (torch.cat(x) for x in zip(*parts, strict=True))
    return [grad_query, _sum_group(grad_key, repeat), _sum_group(grad_value, repeat)]


def _segments(packed: Sequence[Tensor], lengths: list[int]) -> Iterator[tuple[Tensor, ...]]:
    """Yield each sequence of the packed tensors [P, N, H] as [1, N, T, H]."""
    return zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in packed), strict=True)


def _for_queries(x_PKH: Tensor, repeat: int) -> Tensor:
    """Repeat each key or value head for every query head that reads it. Returns [P, N, H]."""
    return x_PKH if repeat == 1 else x_PKH.repeat_interleave(repeat, dim=1)


def _sum_group(grad_PNH: Tensor, repeat: int) -> Tensor:
    """Sum the gradients of repeated heads, [P, N, H] to [P, K, H]."""
    return grad_PNH if repeat == 1 else grad_PNH.unflatten(1, (-1, repeat)).sum(dim=2)


def _own_scores(query_PNH: Tensor, kv_PKH: Tensor, scale: float) -> Tensor:
    """Return the scaled scores [P, N] of each row's query with its own key, in `wide_dtype`."""
    key_PKH = kv_PKH.chunk(2, dim=1)[0]
    key_PNH = _for_queries(key_PKH, query_PNH.shape[1] // key_PKH.shape[1])
    return (query_PNH * key_PNH).sum(dim=-1, dtype=wide_dtype(query_PNH.dtype)) * scale
