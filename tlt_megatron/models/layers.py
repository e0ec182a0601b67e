"""Parts of a decoder layer: matrices, norm and rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.config import RopeConfig
from tlt_megatron.models.matrix import Matrix


class DenseLayer(NamedTuple):
    """The matrices and norms of a layer for `Arithmetic.layers`. None: there is no such one."""

    qkv: Matrix | None  # None: the heads are given
    qk_norm: Tensor | None
    output: Matrix
    post_norm: Tensor | None
    gate_up: Matrix
    down: Matrix
    next_norm: Tensor | None  # of the layer after it, or the final norm


class RmsNorm:
    """x * weight / sqrt(mean(x^2) + eps) over the last dim, in at least float32 as in transformers.

    On a CPU `F.rms_norm` runs nine kernels and this runs five, which matters for short passes.
    """

    def __init__(self, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.eps = torch.tensor(eps, dtype=wide_dtype(dtype), device=device)

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the normalized x, times `weight`, which broadcasts to x."""
        wide = x if x.dtype == self.eps.dtype else x.to(self.eps.dtype)
        length = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(self.eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        normed = wide * scale
        if normed.dtype != x.dtype:
            normed = normed.to(x.dtype)
        return normed if weight is None else normed.mul_(weight)

    def after(
        self,
        layer: Callable[..., Tensor],
        inputs: Tensor,
        residual_PD: Tensor,
        weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return x = layer(inputs) + residual, and the normalized x. `layer` takes (inputs,
        addend).
        """
        x_PD = layer(inputs, residual_PD)
        return x_PD, self(x_PD, weight)


class AddingNorm(RmsNorm):
    """A norm whose kernel adds before. So a layer need not."""

    def add(self, x: Tensor, weight: Tensor | None, addend_PD: Tensor | None = None) -> Tensor:
        """Return the normalized x, after the addend was added to x in place."""
        raise NotImplementedError

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.add(x, weight)

    def after(
        self,
        layer: Callable[..., Tensor],
        inputs: Tensor,
        residual_PD: Tensor,
        weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        x_PD = layer(inputs, None)
        return x_PD, self.add(x_PD, weight, residual_PD)


def rope_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return [H/2], the angle per position of each channel pair, as transformers has them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        blend = _yarn_blend(rope, head_dim, dtype)
    elif rope.kind == "llama3":
        # Low frequencies are divided by `factor` and high ones kept. Those between are blended by
        # their number of turns in the original context.
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
    else:
        return frequencies
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn_blend(rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return [H/2]: 1 for channel pairs of many turns in the original context, 0 for those of few,
    a line between.
    """

    def pair_of(turns: float) -> float:
        length = rope.original_max_position_embeddings / (2 * math.pi * turns)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=dtype)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)


class RotaryTable:
    """cos and signed sin of every position up to the longest reserved; grows by doubling.

    Angles are float32, as in transformers and Megatron, or float64 for a float64 model.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._angle_dtype = wide_dtype(dtype)
        self._frequencies = rope_frequencies(rope, head_dim, self._angle_dtype)
        self._length = rope.attention_factor
        # What `lookup` reads. `reserve` replaces it when it grows.
        self.table_SH2 = torch.empty(0, 2 * head_dim, dtype=dtype, device=device)

    def reserve(self, num_positions: int) -> None:
        """Make positions 0..num_positions-1 available. Not for the hot path."""
        if num_positions <= self.table_SH2.shape[0]:
            return
        size = max(num_positions, 2 * self.table_SH2.shape[0], 256)
        angles = torch.outer(torch.arange(size, dtype=self._angle_dtype), self._frequencies)
        cos, sin = self._length * angles.cos(), self._length * angles.sin()
        self.table_SH2 = torch.cat((cos, cos, -sin, sin), dim=-1).to(self.table_SH2)

    def lookup(self, position_ids_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, signed sin), each [P, 1, H], for `apply_rope_`."""
        rows = self.table_SH2.index_select(0, position_ids_P).unsqueeze(1)
        cos_P1H, sin_P1H = rows.chunk(2, dim=-1)
        return cos_P1H, sin_P1H


def apply_rope_(heads_PNH: Tensor, cos_P1H: Tensor, sin_P1H: Tensor) -> None:
    """Rotate the halves of H in place: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    swapped = heads_PNH.roll(heads_PNH.shape[-1] // 2, -1)
    heads_PNH.mul_(cos_P1H).addcmul_(swapped, sin_P1H)
