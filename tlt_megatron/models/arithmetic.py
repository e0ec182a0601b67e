"""The operations of a forward pass, chosen when a model is made. `PLAIN` is the fastest choice.

`invariant_arithmetic.invariant_arithmetic` makes the one whose results do not depend on the other rows of a
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention import Attention, PageAttention
from tlt_megatron.models.attention.lanes import LaneTreeAttention, LaneView
from tlt_megatron.models.attention.paged import PagedAttention, PrefillAttention, PrefillSegment
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.layers import RmsNorm, apply_rope_
from tlt_megatron.models.matrix import Matrix


def gate_silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The operations of a forward pass."""

    matrix: Callable[[Tensor, Tensor | None], Matrix] = Matrix  # weight, bias
    norm: type[RmsNorm] = RmsNorm
    rotate_: Callable[[Tensor, Tensor, Tensor], None] = apply_rope_  # heads, cos, sin
    gate: Callable[[Tensor, Tensor], Tensor] = gate_silu
    prefill: Callable[[KvCache, Sequence[PrefillSegment]], Attention] = PrefillAttention
    paged: Callable[[KvCache], PageAttention] = PagedAttention
    lanes: Callable[[LaneView, Tensor, Tensor], Attention] = LaneTreeAttention


PLAIN = Arithmetic()
