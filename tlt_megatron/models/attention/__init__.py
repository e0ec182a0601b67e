"""Attention of the forward passes. `kernels.py` alone calls torch's private attention kernels.

`paged.py` and `lanes.py` read the KV cache; `invariant_attention.py` replaces both for batch-invariant
arithmetic. `packed.py` is differentiable: the drafter's training and Megatron's local layers on a
CPU use it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """Stores keys and values of packed tokens, then attends over the keys visible to each query."""

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """Return [P, N*H]. `kv_PKH` is [P, 2K, H]: K rotated key heads, then K value heads."""
        ...
