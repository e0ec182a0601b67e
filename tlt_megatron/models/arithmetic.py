"""The operations of a forward pass: matrix products, norms, rotation and attention, chosen once when the model is made.

`Transformer` uses all but the attentions, which the engine's passes make. `PLAIN` is the fastest.
`invariant.invariant_arithmetic` makes the variant whose results do not depend on the other rows of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention import Attention
from tlt_megatron.models.attention.lanes import LaneView, lane_attention
from tlt_megatron.models.attention.paged import PagedAttention, PrefillAttention, PrefillSegment
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.layers import RmsNorm, apply_rope_
from tlt_megatron.models.matrix import Matrix


class Product(Protocol):
    """See `Matrix`."""

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """Return [P, out] for x [P, in]. `addend` [P, out] is not changed."""


class Norm(Protocol):
    """See `RmsNorm`."""

    eps: Tensor

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the normalized x, times `weight`, which broadcasts to x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The operations of a forward pass."""

    matrix: Callable[[Tensor, Tensor | None], Product]  # weight, bias
    norm: Callable[[float, torch.dtype, torch.device], Norm]  # eps
    rotate_: Callable[[Tensor, Tensor, Tensor], None]  # heads, cos, sin
    gate: Callable[[Tensor, Tensor], Tensor]  # silu(gate) * up
    prefill: Callable[[KvCache, Sequence[PrefillSegment]], Attention]
    paged: Callable[[KvCache], PagedAttention]
    lanes: Callable[[LaneView, Tensor, Tensor, Tensor], Attention]  # see `lane_attention`
    # Whether position t of a sequence must have offset t % page_size in its page. All sequences then have the same page
    # borders, and a response begins in a copy of its prompt's last page.
    aligns_pages: bool


def gate_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return F.silu(gate).mul_(up)


PLAIN = Arithmetic(
    matrix=Matrix,
    norm=RmsNorm,
    rotate_=apply_rope_,
    gate=gate_silu,
    prefill=PrefillAttention,
    paged=PagedAttention,
    lanes=lane_attention,
    aligns_pages=False,
)
