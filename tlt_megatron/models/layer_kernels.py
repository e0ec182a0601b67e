"""Arithmetic of the CUDA path: what lies between two matrices of a layer is one Triton kernel. Not
yet run on hardware.

A program computes whole rows or heads, so its bits do not depend on the other rows:
`row_kernels.py` uses these kernels for `rollout.batch_invariant` too. `TRITON_INTERPRET=1` runs
them on a CPU: tests/kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_megatron.models.attention.fused_kernel import triton_wide
from tlt_megatron.models.layers import AddingNorm, RmsNorm

_GATE_BLOCK = 1024  # outputs of one program


@triton.jit
def _scale_of(values, eps, SIZE: tl.constexpr):
    return 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + tl.load(eps))


@triton.jit
def _normalize(
    x,
    addend,
    weight,
    eps,
    out,
    addend_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Add a row of `addend` to that of x. Then write x * weight / sqrt(mean(x^2) + eps)."""
    row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_dim = dims < SIZE
    values = tl.load(x + row * SIZE + dims, mask=is_dim, other=0.0).to(WIDE)
    if HAS_ADDEND:
        values += tl.load(addend + row * addend_row + dims, mask=is_dim, other=0.0).to(WIDE)
        values = values.to(x.dtype.element_ty)
        tl.store(x + row * SIZE + dims, values, mask=is_dim)
        values = values.to(WIDE)
    normed = (values * _scale_of(values, eps, SIZE)).to(out.dtype.element_ty)
    if HAS_WEIGHT:
        weights = tl.load(weight + dims, mask=is_dim, other=0.0)
        normed = normed.to(WIDE) * weights.to(WIDE)
    tl.store(out + row * SIZE + dims, normed, mask=is_dim)


@triton.jit
def _rotate(
    heads,
    weight,
    eps,
    cos,
    sin,
    out,
    heads_row,
    angles_row,
    num_rotated,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Write a head of a token: normalized and rotated, unless it holds values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    kind = out.dtype.element_ty
    # The other half is read again, and not what another thread may have written already.
    others = tl.where(dims < HALF, dims + HALF, dims - HALF)
    is_dim, is_turned = dims < SIZE, dims < 2 * HALF
    heads += token * heads_row + head * SIZE
    values = tl.load(heads + dims, mask=is_dim, other=0.0)
    if head < num_rotated:
        swapped = tl.load(heads + others, mask=is_turned, other=0.0)
        if HAS_WEIGHT:
            weight += head * SIZE
            scale = _scale_of(values.to(WIDE), eps, SIZE)
            weights = tl.load(weight + dims, mask=is_dim, other=0.0)
            values = ((values.to(WIDE) * scale).to(kind).to(WIDE) * weights.to(WIDE)).to(kind)
            weights = tl.load(weight + others, mask=is_turned, other=0.0)
            swapped = ((swapped.to(WIDE) * scale).to(kind).to(WIDE) * weights.to(WIDE)).to(kind)
        angles = token * angles_row + dims
        turned = values.to(WIDE) * tl.load(cos + angles, mask=is_turned, other=1.0).to(WIDE)
        turned += swapped.to(WIDE) * tl.load(sin + angles, mask=is_turned, other=0.0).to(WIDE)
        values = tl.where(is_turned, turned.to(kind), values)
    place = (token * tl.num_programs(1) + head) * SIZE
    tl.store(out + place + dims, values, mask=is_dim)


@triton.jit
def _gate(gate, up, out, size, gate_row, up_row, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Write silu(gate) * up of a part of a row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < size
    gates = tl.load(gate + row * gate_row + at, mask=is_in, other=0.0).to(WIDE)
    ups = tl.load(up + row * up_row + at, mask=is_in, other=0.0).to(WIDE)
    silu = (gates / (1.0 + tl.exp(-gates))).to(out.dtype.element_ty).to(WIDE)
    tl.store(out + row * size + at, silu * ups, mask=is_in)


def normalize(
    x: Tensor, weight: Tensor | None, eps: Tensor, addend_PD: Tensor | None = None
) -> Tensor:
    """Return the normalized x [.., D], times `weight` [D]. An addend is added to x, in place,
    before.
    """
    assert addend_PD is None or x.is_contiguous()
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    _normalize[(x.numel() // size,)](  # pyright: ignore[reportIndexIssue]
        x,
        x if addend_PD is None else addend_PD,
        x if weight is None else weight,
        eps,
        out,
        0 if addend_PD is None else addend_PD.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        WIDE=triton_wide(x.dtype),
        HAS_ADDEND=addend_PD is not None,
        HAS_WEIGHT=weight is not None,
    )
    return out


def rotate(
    heads_PAH: Tensor,
    num_rotated: int,
    angles: tuple[Tensor, Tensor],
    norm: RmsNorm,
    weight: Tensor | None,
) -> Tensor:
    """See `arithmetic.rotate_in_place`. The result is another tensor."""
    num_tokens, num_heads, size = heads_PAH.shape
    out, (cos_P1H, sin_P1H) = heads_PAH.new_empty(heads_PAH.shape), angles
    _rotate[(num_tokens, num_heads)](  # pyright: ignore[reportIndexIssue]
        heads_PAH,
        heads_PAH if weight is None else weight,
        norm.eps,
        cos_P1H,
        sin_P1H,
        out,
        heads_PAH.stride(0),
        cos_P1H.stride(0),
        num_rotated,
        SIZE=size,
        HALF=cos_P1H.shape[-1] // 2,
        BLOCK=triton.next_power_of_2(size),
        WIDE=triton_wide(heads_PAH.dtype),
        HAS_WEIGHT=weight is not None,
        num_warps=1,
    )
    return out


def gate_silu(gate_PF: Tensor, up_PF: Tensor) -> Tensor:
    """See `arithmetic.gate_silu`."""
    num_tokens, size = gate_PF.shape
    out = gate_PF.new_empty(num_tokens, size)
    _gate[(num_tokens, triton.cdiv(size, _GATE_BLOCK))](  # pyright: ignore[reportIndexIssue]
        gate_PF,
        up_PF,
        out,
        size,
        gate_PF.stride(0),
        up_PF.stride(0),
        BLOCK=_GATE_BLOCK,
        WIDE=triton_wide(gate_PF.dtype),
    )
    return out


class FusedNorm(AddingNorm):
    """`RmsNorm` as one kernel, with the sum before it."""

    def add(self, x: Tensor, weight: Tensor | None, addend_PD: Tensor | None = None) -> Tensor:
        return normalize(x, weight, self.eps, addend_PD)
