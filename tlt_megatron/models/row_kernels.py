"""Arithmetic for `rollout.batch_invariant` on CUDA: Triton kernels of fixed shapes. Not yet run on
hardware.

The tile shape of a matrix product is the same for any number of rows. Each row is summed from its
first input to its last, in blocks of one size. So its bits do not depend on the other rows. On a
CPU `invariant_arithmetic.py` does the same with torch's kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_megatron.models.arithmetic import Arithmetic, fastest_arithmetic, require_equal
from tlt_megatron.models.attention.fused_kernel import triton_wide
from tlt_megatron.models.attention.ordered_kernel import OrderedAttention
from tlt_megatron.models.attention.tables import TablePages, table_lanes, table_prefill
from tlt_megatron.models.matrix import Matrix


@triton.jit
def _multiply(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    x_row,
    weight_row,
    weight_column,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write one tile of x @ weight.T + bias."""
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    outs = (tl.program_id(0) * OUTS + tl.arange(0, OUTS)).to(tl.int64)
    is_row, is_out = rows < num_rows, outs < num_out
    sums = tl.zeros([ROWS, OUTS], WIDE)
    for start in range(0, num_in, INS):
        at = start + tl.arange(0, INS)
        is_in = at < num_in
        inputs_at = x + rows[:, None] * x_row + at[None, :]
        inputs = tl.load(inputs_at, mask=is_row[:, None] & is_in[None, :], other=0.0)
        weights_at = weight + outs[None, :] * weight_row + at[:, None] * weight_column
        weights = tl.load(weights_at, mask=is_in[:, None] & is_out[None, :], other=0.0)
        sums += tl.dot(inputs, weights, input_precision="ieee", out_dtype=WIDE)
    if HAS_BIAS:
        sums += tl.load(bias + outs, mask=is_out, other=0.0).to(WIDE)[None, :]
    places = rows[:, None] * num_out + outs[None, :]
    tl.store(out + places, sums, mask=is_row[:, None] & is_out[None, :])


def tile_options(dtype: torch.dtype) -> dict[str, object]:
    """Return the compile-time arguments of `_multiply`. They depend on the dtype alone."""
    return {
        "ROWS": 64,
        "OUTS": 64,
        "INS": 64 if dtype.itemsize == 2 else 32,
        "WIDE": triton_wide(dtype),
    }


def multiply(x_PI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, [P, O]. Rows of x must be contiguous."""
    num_rows, num_in = x_PI.shape
    num_out = weight_OI.shape[0]
    out = x_PI.new_empty(num_rows, num_out)
    options = tile_options(x_PI.dtype)
    grid = triton.cdiv(num_out, options["OUTS"]), triton.cdiv(num_rows, options["ROWS"])
    _multiply[grid](  # pyright: ignore[reportIndexIssue]
        x_PI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out,
        num_rows,
        num_out,
        num_in,
        x_PI.stride(0),
        *weight_OI.stride(),
        HAS_BIAS=bias_O is not None,
        **options,
    )
    return out


class RowMatrix(Matrix):
    """`Matrix` with tiles of one size and a fixed order over the inputs."""

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        out = multiply(x, self._weight, self._bias)
        return out if addend is None else out.add_(addend)


def row_arithmetic(dtype: torch.dtype, device: torch.device) -> Arithmetic:
    """Return it. RuntimeError if a product's row depends on its place in a tile on this GPU."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(96, 128, generator=generator)
    x = torch.cat((half, -half.flip(1)), dim=1).to(device, dtype)  # cancels: shows any other order
    weight = torch.cat((half, half.flip(1)), dim=1).to(device, dtype)
    matrix = RowMatrix(weight)
    expected = matrix(x)
    for rows in (slice(0, 1), slice(17, 20), slice(31, 96)):
        what = f"a {dtype} product of rows {rows.start} to {rows.stop - 1} is not that of 96 rows"
        require_equal([matrix(x[rows])], [expected[rows]], what)
    return replace(
        fastest_arithmetic(device),
        matrix=RowMatrix,
        prefill=partial(table_prefill, OrderedAttention),
        paged=partial(TablePages, OrderedAttention),
        lanes=partial(table_lanes, OrderedAttention),
        has_loose_lanes=False,
    )
