"""Norm, rotary embedding and gate of Megatron's local layers on a CPU, with their own backward
passes.

Autograd would run two to three times as many kernels, each of which reads and writes whole
activations. In float32 results and gradients of each part are the same, bit for bit. In a model the
gradients of a residual stream are added in another order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention.sums import wide_dtype


class Norm(torch.autograd.Function):
    """x * weight / sqrt(mean(x^2) + eps) over the last dim, in at least float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x.dtype))
        scale = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        wide, grad = x.to(scale.dtype), grad.to(scale.dtype)
        grad_weight = (grad * (wide * scale)).sum_to_size(weight.shape)
        grad = grad * weight
        grad_scale = (grad * wide).sum(-1, keepdim=True)
        grad_square = -0.5 * grad_scale * scale.pow(3) / x.shape[-1]
        grad_x = grad.mul_(scale).add_(wide * (2.0 * grad_square))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class Rotation(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the halves of the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x * cos
    (x1, x2), (sin1, sin2), (out1, out2) = (each.chunk(2, -1) for each in (x, sin, out))
    out1.sub_(x2 * sin1)
    out2.add_(x1 * sin2)
    return out


def rotate(t: Tensor, freqs: Tensor, *, mscale: float = 1.0, **kinds: bool | None) -> Tensor:
    """Replace Megatron's `_apply_rotary_pos_emb_bshd`. No model here is interleaved or has another
    of its `kinds`.
    """
    assert not any(kinds.values()), kinds
    cos, sin = ((turn(freqs) * mscale).to(t.dtype) for turn in (torch.cos, torch.sin))
    num_turned = freqs.shape[-1]
    if num_turned == t.shape[-1]:
        return Rotation.apply(t, cos, sin)
    turned = Rotation.apply(t[..., :num_turned], cos, sin)
    return torch.cat((turned, t[..., num_turned:]), dim=-1)


class Gate(torch.autograd.Function):
    """silu(gate) * up. x holds the gate, then up, along the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        opened = F.silu(gate)
        ctx.save_for_backward(x, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, opened = ctx.saved_tensors
        (gate, up), grad_x = x.chunk(2, -1), torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grad, opened, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x
