"""Norm, gate and rotation of Megatron's local layers on a CPU, with gradients.

Each is one compiled loop, where torch runs up to nine operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlt_megatron.models import cpu_kernels
from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.cpu_kernels import KINDS


class Norm(torch.autograd.Function):
    """x * weight / sqrt(mean(x^2) + eps) over the last dim. Its sums are in `wide_dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, out, kind = x.contiguous(), torch.empty(x.shape, dtype=x.dtype), KINDS[x.dtype]
        size, ctx.eps = x.shape[-1], torch.tensor(eps, dtype=wide_dtype(x.dtype)).numpy()[()]
        inputs = x.data_ptr(), size, 0, 0, weight.data_ptr(), ctx.eps
        cpu_kernels.normalize(*inputs, out.data_ptr(), x.numel() // size, size, kind)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad, out, size = grad.contiguous(), torch.empty_like(x), x.shape[-1]
        sums = torch.zeros(size, dtype=torch.float64)  # of many rows
        inputs = grad.data_ptr(), x.data_ptr(), weight.data_ptr(), ctx.eps
        shape = x.numel() // size, size, KINDS[x.dtype]
        cpu_kernels.differentiate_norm(*inputs, out.data_ptr(), sums.numpy(), *shape)
        return out, sums.to(weight.dtype), None


class Gate(torch.autograd.Function):
    """silu(first half) * second half, of the last dim."""

    @staticmethod
    def forward(ctx: Any, halves: Tensor) -> Tensor:
        halves = halves.contiguous()
        *shape, width = halves.shape
        out, kind = halves.new_empty(*shape, width // 2), KINDS[halves.dtype]
        up = halves.data_ptr() + width // 2 * halves.itemsize
        inputs = halves.data_ptr(), width, up, width
        cpu_kernels.gate(*inputs, out.data_ptr(), halves.numel() // width, width // 2, kind)
        ctx.save_for_backward(halves)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (halves,) = ctx.saved_tensors
        grad, out, size = grad.contiguous(), torch.empty_like(halves), grad.shape[-1]
        inputs = grad.data_ptr(), halves.data_ptr(), out.data_ptr()
        cpu_kernels.differentiate_gate(*inputs, grad.numel() // size, size, KINDS[grad.dtype])
        return out


class Rotation(torch.autograd.Function):
    """Heads [P, 1, N, H], of which the first R values turn by angles whose cos and sin are
    [P, 1, 1, R].
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    num_tokens, _, num_heads, size = heads.shape
    assert cos.shape == sin.shape == (num_tokens, 1, 1, cos.shape[-1])  # the loop takes it on trust
    out, width = heads.clone(memory_format=torch.contiguous_format), cos.shape[-1]
    angles, kind = (cos.data_ptr(), sin.data_ptr(), width), KINDS[heads.dtype]
    shape = num_tokens, num_heads, size, width // 2
    eps = torch.zeros((), dtype=wide_dtype(heads.dtype)).numpy()[()]  # there is no norm
    cpu_kernels.rotate(out.data_ptr(), num_heads * size, 0, eps, *angles, shape, kind)
    return out


def rotate(heads: Tensor, freqs: Tensor, mscale: float) -> Tensor:
    """Turn heads [P, 1, N, H] by angles [P, 1, 1, R], as Megatron does without interleaving."""
    cos, sin = ((each * mscale).to(heads.dtype) for each in (freqs.cos(), freqs.sin()))
    return Rotation.apply(heads, cos, sin)
