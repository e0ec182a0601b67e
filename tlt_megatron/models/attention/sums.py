"""How attention adds up: the dtype of its sums, and the parts into which a kernel cuts the keys."""

from __future__ import annotations

import torch

PART_KEYS = 512  # keys of one program on CUDA: few long sequences still occupy the whole GPU


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
