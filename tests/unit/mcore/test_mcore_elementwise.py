"""The elementwise parts of the local layers against torch's own, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.mcore import elementwise

P, N, H = 37, 3, 32


def _rotate_as_megatron(x: Tensor, freqs: Tensor) -> Tensor:
    size = freqs.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    x1, x2 = turned.chunk(2, -1)
    cos, sin = freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)
    return torch.cat((turned * cos + torch.cat((-x2, x1), -1) * sin, rest), -1)


def _gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["norm", "rotation", "part of a head", "gate"])
def test_results_and_gradients_are_torchs(part: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.rand(H).to(dtype).requires_grad_()
    freqs = torch.rand(P, 1, 1, H if part == "rotation" else H // 2)
    freqs = torch.cat((freqs.chunk(2, -1)[0],) * 2, -1)
    pairs: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "norm": (
            lambda x: elementwise.Norm.apply(x, weight, 1e-6),
            lambda x: F.rms_norm(x, (H,), weight, 1e-6),
        ),
        "gate": (elementwise.Gate.apply, _gate),
    }
    turn = (lambda x: elementwise.rotate(x, freqs), lambda x: _rotate_as_megatron(x, freqs))
    values, grad = torch.randn(P, 1, N, H), torch.randn(P, 1, N, H)
    found = []
    for run in pairs.get(part, turn):
        weight.grad = None
        x = values.to(dtype).requires_grad_()
        out = run(x)
        out.backward(grad.to(dtype)[..., : out.shape[-1]])
        found.append([out, x.grad, *([weight.grad] if part == "norm" else [])])
    for own, expected in zip(*found, strict=True):
        if part == "norm" and dtype == torch.bfloat16:  # rounded once, torch rounds twice
            torch.testing.assert_close(own, expected, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(own, expected)
