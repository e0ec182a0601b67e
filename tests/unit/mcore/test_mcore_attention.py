"""The local core attention in bfloat16; tests/distributed/test_mcore_parity.py compares packed
sequences with transformers.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from tlt_megatron.mcore.attention import SdpaCoreAttention

N, K, H = 4, 2, 8


def _inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, H, generator=generator) for heads in (N, K, K)]


def test_packed_bfloat16_differentiates_as_exactly_as_its_inputs_allow() -> None:
    """Against float64 on the same rounded inputs: one rounding of the output, a few of the
    gradients.
    """
    lengths = [5, 1, 9]
    rounded = [x.bfloat16() for x in _inputs(sum(lengths))]
    bounds = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 6, 15], dtype=torch.int32))

    def run(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in rounded]
        out = SdpaCoreAttention()(*inputs, packed_seq_params=bounds)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        return [out, *torch.autograd.grad(out, inputs, weights.bfloat16().to(dtype))]

    for mine, exact in zip(run(torch.bfloat16), run(torch.float64), strict=True):
        assert mine.dtype == torch.bfloat16
        assert mine.shape == exact.shape
        assert (mine - exact).norm() < 4e-3 * exact.norm()
