"""How attention adds up: the dtype of its sums, and the parts into which a kernel cuts the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PART_KEYS = 512  # most keys of one program on CUDA: few long sequences still occupy the whole GPU
_MIN_PART_KEYS = 64  # a block of keys
_QUERIES = 64  # most of a program
_MIN_PROGRAMS = 128  # of a launch; an H100 has 132 multiprocessors


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def part_keys(shape_BKR: Sequence[int], num_keys: int) -> int:
    """Return the keys of one program, for B sequences with K kv heads of R queries: fewer than
    `PART_KEYS` where a GPU would be idle else. So a row's last bits depend on how large its batch
    is.
    """
    num_rows, num_heads, num_queries = shape_BKR
    num_programs = num_rows * num_heads * -(-num_queries // _QUERIES)  # of a part
    part = PART_KEYS
    while part > _MIN_PART_KEYS and num_programs * -(-num_keys // part) < _MIN_PROGRAMS:
        part //= 2
    return part


def result_buffers(
    query: Tensor, num_keys: int, part: int = PART_KEYS
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return room for a kernel's outputs [.., H] and lse [..], and for those of its M parts of the
    keys: [.., M, H], [.., M].

    With one part both are the same.
    """
    *shape, head_dim = query.shape
    wide, num_parts = wide_dtype(query.dtype), -(-num_keys // part)
    whole = query.new_empty(query.shape), query.new_empty(shape, dtype=wide)
    if num_parts == 1:
        return whole, whole
    out = query.new_empty((*shape, num_parts, head_dim), dtype=wide)
    return whole, (out, query.new_empty((*shape, num_parts), dtype=wide))
