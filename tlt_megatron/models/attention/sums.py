"""How attention adds up: the dtype of its sums, and the parts into which a kernel cuts the keys."""

from __future__ import annotations

import torch
from torch import Tensor

PART_KEYS = 512  # keys of one program on CUDA: few long sequences still occupy the whole GPU


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def result_buffers(query: Tensor, num_keys: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return room for a kernel's outputs [.., H] and lse [..], and for those of its M parts of the
    keys: [.., M, H], [.., M].

    With one part both are the same.
    """
    *shape, head_dim = query.shape
    wide, num_parts = wide_dtype(query.dtype), -(-num_keys // PART_KEYS)
    whole = query.new_empty(query.shape), query.new_empty(shape, dtype=wide)
    if num_parts == 1:
        return whole, whole
    out = query.new_empty((*shape, num_parts, head_dim), dtype=wide)
    return whole, (out, query.new_empty((*shape, num_parts), dtype=wide))
