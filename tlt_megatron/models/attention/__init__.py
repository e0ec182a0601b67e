"""Attention of the forward passes. `kernels.py` alone calls torch's private attention kernels.

`paged.py` and `lanes.py` read the KV cache; `tables.py` replaces both for batch-invariant
arithmetic. `packed.py` is differentiable: the drafter's training and Megatron's local layers on a
CPU use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tlt_megatron.models.kv_cache import SequenceKv


class Attention(Protocol):
    """Stores keys and values of packed tokens, then attends over the keys visible to each query."""

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """Return [P, N*H]. `kv_PKH` is [P, 2K, H]: K rotated key heads, then K value heads."""
        ...


class PageAttention(Protocol):
    """One query per sequence over pages: call `rebuild` after pages or sequences change."""

    def rebuild(self, sequences: Sequence[SequenceKv]) -> None:
        """Plan for these sequences, in batch order."""

    def pass_of(self, slots_B: Tensor, positions_B: Tensor, /) -> Attention:
        """Return the attention of a pass that writes these slots, one per sequence, and their
        positions.
        """
        ...
