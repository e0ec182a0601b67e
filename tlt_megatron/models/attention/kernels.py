"""Softmax attention that also returns the log of its normalizer (lse), and its gradient.

With lse, parts of one context, such as a shared prompt and a response's own pages, are merged
exactly. This file alone calls torch's private kernels, which exist on the CPU, and
`fused_kernel.py`. Causal attention on CUDA is plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_megatron.models.attention.sums import part_keys, result_buffers, wide_dtype
from tlt_megatron.runtime.device import has_triton

_QUERY_CHUNK = 512  # queries whose scores are in memory at once, without a fused kernel


def attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention [B, K, R, H] and the log of its normalizer [B, K, R].

    query [B, K, R, H]: R counts all queries of kv head k (siblings, query heads of a group, draft
    nodes).
    key, value [B, K, S, H]: any strides with contiguous H. bias broadcasts to [B, K, R, S];
    `is_causal` needs none, and R = S. With `is_fused`, each row of bias [B, 1, X, S] serves R / X
    queries in order, and a query that sees no key has output 0 and lse -inf.
    lse is float32, or float64 for float64 inputs. A `scale` of None is 1 / sqrt(H).
    """
    if query.is_cpu:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    if bias is None or is_causal or not is_fused(query):
        return attend_in_chunks(query, key, value, bias, is_causal=is_causal, scale=scale)
    return attend_fused(query, key, value, bias)


def is_fused(query: Tensor) -> bool:
    """Whether attention with a bias writes no scores and needs no bias for each head.

    A meta tensor counts as on CUDA: a dry run takes the memory that CUDA will take.
    """
    return query.is_meta or (query.is_cuda and has_triton())


def bias_for_queries(bias_BRS: Tensor, repeat: int) -> Tensor:
    """Return the bias [B, 1, X, S] of `attend_grouped`, where a kv head has `repeat` query
    heads.
    """
    if bias_BRS.shape[1] == 1 or is_fused(bias_BRS):
        return bias_BRS.unsqueeze(1)
    return bias_BRS.repeat_interleave(repeat, dim=1).unsqueeze(1)


def attend_grouped(
    query_BRNH: Tensor,
    key_BKSH: Tensor,
    value_BKSH: Tensor,
    bias: Tensor,
    starts_B: Tensor | None = None,
) -> Tensor:
    """Return the attention [B * R, N * H] of R queries of each row. N / K query heads share a kv
    head.

    `bias` is from `bias_for_queries`. With a fused kernel, the keys of row b begin `starts_B[b]`
    places after the first of `key_BKSH`.
    """
    num_rows, num_queries, num_heads, head_dim = query_BRNH.shape
    groups = key_BKSH.shape[1], num_heads // key_BKSH.shape[1]
    query_BRKGH = query_BRNH.view(num_rows, num_queries, *groups, head_dim)
    query = query_BRKGH.transpose(1, 2).flatten(2, 3)
    if starts_B is None:
        out, _ = attend_with_lse(query, key_BKSH, value_BKSH, bias)
    else:
        out, _ = attend_fused(query, key_BKSH, value_BKSH, bias, starts_B)
    out_BKRGH = out.view(num_rows, groups[0], num_queries, groups[1], head_dim)
    return out_BKRGH.transpose(1, 2).reshape(-1, num_heads * head_dim)


def attend_fused(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, starts_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_keys = key.shape[2]
    part = part_keys(query.shape[:3], num_keys)
    whole, parts = result_buffers(query, num_keys, part)
    if not query.is_meta:
        # Imported when needed: CPU builds of torch come without triton.
        from tlt_megatron.models.attention import fused_kernel

        fused_kernel.launch(query, key, value, bias, starts_B, whole, parts, part)
    return whole


def differentiate_causal(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of causal attention over one part of a context.

    `out` and `lse` are of the whole context, as in FlashAttention-2 (Dao 2023) and ring attention.
    """
    if query.is_cpu:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, True, scale=scale
        )
    return differentiate_in_chunks(grad, query, key, value, out, lse, scale=scale)


def merge_attention(out_BMKRH: Tensor, lse_BMKR: Tensor) -> Tensor:
    """Merge the attention over M parts of a context. A part with lse -inf adds nothing."""
    weights_BMKR = lse_BMKR.softmax(dim=1)
    return (out_BMKRH * weights_BMKR.unsqueeze(-1)).sum(dim=1).to(out_BMKRH.dtype)


def _scores(query: Tensor, key: Tensor, start: int, is_causal: bool, scale: float | None) -> Tensor:
    """Return the scores of a chunk of queries, of which the first has position `start`."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.transpose(-1, -2)).to(wide_dtype(query.dtype)) * factor
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        scores.masked_fill_(hidden.triu_(start + 1), -torch.inf)
    return scores


def attend_in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    chunk: int = _QUERY_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Run `attend_with_lse` in plain torch, for `chunk` queries at a time."""
    outs, lses = [], []
    for start in range(0, query.shape[2], chunk):
        rows = slice(start, start + chunk)
        seen = slice(start + chunk) if is_causal else slice(None)
        scores = _scores(query[:, :, rows], key[:, :, seen], start, is_causal, scale)
        if bias is not None:
            scores += bias[:, :, rows] if bias.shape[2] > 1 else bias
        lses.append(scores.logsumexp(dim=-1))
        weights = scores.sub_(lses[-1].unsqueeze(-1)).exp_().to(value.dtype)
        outs.append(weights @ value[:, :, seen])
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def differentiate_in_chunks(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    chunk: int = _QUERY_CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `differentiate_causal` in plain torch, for `chunk` queries at a time."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    grad_query = torch.empty_like(query)
    grad_key = torch.zeros_like(key, dtype=lse.dtype)
    grad_value = torch.zeros_like(value, dtype=lse.dtype)
    delta = (grad * out).sum(dim=-1, keepdim=True, dtype=lse.dtype)
    for start in range(0, query.shape[2], chunk):
        rows, seen = slice(start, start + chunk), slice(start + chunk)
        scores = _scores(query[:, :, rows], key[:, :, seen], start, True, scale)
        weights = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        grad_weights = (grad[:, :, rows] @ value[:, :, seen].transpose(-1, -2)).to(lse.dtype)
        grad_scores = weights * grad_weights.sub_(delta[:, :, rows]) * factor
        grad_scores = grad_scores.to(query.dtype)
        grad_value[:, :, seen] += weights.to(grad.dtype).transpose(-1, -2) @ grad[:, :, rows]
        grad_key[:, :, seen] += grad_scores.transpose(-1, -2) @ query[:, :, rows]
        grad_query[:, :, rows] = grad_scores @ key[:, :, seen]
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)
