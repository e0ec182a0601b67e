"""Arithmetic for `rollout.batch_invariant` on CUDA: Triton kernels of fixed shapes. Not yet run on hardware.

On the CPU `invariant_arithmetic.py` does the same with torch's kernels.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tlt_megatron.models.arithmetic import Arithmetic
from tlt_megatron.models.attention.ordered import OrderedAttention, ordered_lanes
from tlt_megatron.models.attention.tables import TablePages, table_prefill
from tlt_megatron.models.layers import RmsNorm, apply_rope_unfused_
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.models.row_kernels import multiply, normalize


class RowMatrix(Matrix):
    """`Matrix` with tiles of one size and a fixed order over the inputs."""

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        out = multiply(x, self._weight, self._bias)
        return out if addend is None else out.add_(addend)


class RowNorm(RmsNorm):
    """`RmsNorm` with one program for each row."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return normalize(x, weight, self.eps)


def row_arithmetic(dtype: torch.dtype, device: torch.device) -> Arithmetic:
    """Return it. RuntimeError if a product's row depends on its place in a tile on this GPU."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(96, 128, generator=generator)
    x = torch.cat((half, -half.flip(1)), dim=1).to(device, dtype)  # cancels: shows any other order
    weight = torch.cat((half, half.flip(1)), dim=1).to(device, dtype)
    matrix = RowMatrix(weight)
    expected = matrix(x)
    for rows in (slice(0, 1), slice(17, 20), slice(31, 96)):
        if not torch.equal(matrix(x[rows]), expected[rows]):
            raise RuntimeError(
                f"rollout.batch_invariant=True: on this GPU a {dtype} product of rows"
                f" {rows.start} to {rows.stop - 1} is not that of 96 rows"
            )
    return Arithmetic(
        matrix=RowMatrix,
        norm=RowNorm,
        rotate_=apply_rope_unfused_,
        prefill=partial(table_prefill, OrderedAttention),
        paged=partial(TablePages, OrderedAttention),
        lanes=ordered_lanes,
    )
