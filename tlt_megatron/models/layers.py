"""The pieces of a decoder layer that are more than one torch call: norm, rotary embedding, mergeable attention.

Called by `transformer.py` and `attention.py`. What to know: attention comes with the log of its softmax sum, so that
parts of one context (a shared prompt, the response's own pages, later a draft tree) are computed apart and merged exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tlt_megatron.models.config import RopeConfig


class RmsNorm:
    """x * weight / sqrt(mean(x^2) + eps) over the last dim, in float32 at least, as transformers rounds it.

    On a CPU `F.rms_norm` is nine kernels; this is five, which shows where a pass is short.
    """

    def __init__(self, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.eps = torch.tensor(eps, dtype=self._wide, device=device)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """`weight` broadcasts to x."""
        wide = x if x.dtype == self._wide else x.to(self._wide)
        length = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(self.eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        normed = wide * scale
        if normed.dtype != x.dtype:
            normed = normed.to(x.dtype)
        return normed.mul_(weight)


def rope_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[H/2] angle per position of each pair of channels, for the kinds default, linear and llama3 (Llama 3.1)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Long waves are slowed by `factor`, short ones kept, those between blended by how often they fit the old context.
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies


class RotaryTable:
    """cos and sign-folded sin of every position up to the longest seen; grows by doubling.

    Angles are float32, as transformers and Megatron compute them, unless the model is float64.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._frequencies = rope_frequencies(rope, head_dim, self._angle_dtype)
        self._dtype = dtype
        self._device = device
        self._table_SH2 = torch.empty(0, 2 * head_dim, dtype=dtype, device=device)

    @property
    def table_SH2(self) -> Tensor:
        """What `lookup` reads; another tensor after a `reserve` that made it longer."""
        return self._table_SH2

    def reserve(self, num_positions: int) -> None:
        """Make positions 0..num_positions-1 available. Never on the hot path."""
        if num_positions <= self._table_SH2.shape[0]:
            return
        size = max(num_positions, 2 * self._table_SH2.shape[0], 256)
        angles = torch.outer(torch.arange(size, dtype=self._angle_dtype), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        table = torch.cat((cos, cos, -sin, sin), dim=-1)
        self._table_SH2 = table.to(self._device, self._dtype)

    def lookup(self, position_ids_P: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), each [P, 1, H], for `apply_rope_`."""
        rows = self._table_SH2.index_select(0, position_ids_P).unsqueeze(1)
        head_dim = rows.shape[-1] // 2
        return rows[..., :head_dim], rows[..., head_dim:]


def apply_rope_(heads_PNH: Tensor, cos_P1H: Tensor, sin_P1H: Tensor) -> None:
    """Rotate in place, halves layout: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    swapped = heads_PNH.roll(heads_PNH.shape[-1] // 2, -1)
    heads_PNH.mul_(cos_P1H).addcmul_(swapped, sin_P1H)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the log of its normalizer.

    query [B, K, R, H]: R is every query that reads kv head k (siblings, query heads of a group, draft nodes);
    key, value [B, K, S, H], any strides with contiguous H; bias broadcasts to [B, K, R, S].
    Returns (out [B, K, R, H], lse [B, K, R]; lse is float32, or float64 for float64 inputs).
    """
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias
        )
    # TODO: a fused kernel for CUDA; this form is exact but writes the scores to memory.
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = torch.matmul(query, key.transpose(-1, -2)).to(accumulate) * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(value.dtype)
    return torch.matmul(weights, value), lse


def merge_attention(out_BMKRH: Tensor, lse_BMKR: Tensor) -> Tensor:
    """Attention over the union of M parts of a context, from each part's output and lse. A part with lse -inf counts nothing."""
    weights_BMKR = lse_BMKR.softmax(dim=1)
    return (out_BMKRH * weights_BMKR.unsqueeze(-1)).sum(dim=1).to(out_BMKRH.dtype)
