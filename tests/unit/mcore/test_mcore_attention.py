"""The local core attention and norm, against attention written out in full."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tlt_megatron.mcore.attention import SdpaCoreAttention
from tlt_megatron.mcore.model import RMSNorm

T, N, K, H = 12, 4, 2, 8


def _dense(query_TNH: Tensor, key_TKH: Tensor, value_TKH: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(N // K, dim=1) for x in (key_TKH, value_TKH))
    scores = torch.einsum("tnh,snh->nts", query_TNH, key) / H**0.5
    scores = scores.masked_fill(torch.ones(len(key), len(key)).triu(1).bool(), -torch.inf)
    return torch.einsum("nts,snh->tnh", scores.softmax(-1), value).flatten(1)


def _inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, H, generator=generator) for heads in (N, K, K)]


def test_packed_sequences_do_not_see_each_other() -> None:
    lengths = [5, 1, 9]
    inputs = _inputs(sum(lengths))
    bounds = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    out = SdpaCoreAttention()(*inputs, packed_seq_params=SimpleNamespace(cu_seqlens_q=bounds))
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    torch.testing.assert_close(out, torch.cat([_dense(*part) for part in parts]))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm_carries_megatrons_mark_for_sequence_parallelism(sequence_parallel: bool) -> None:
    config = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=sequence_parallel)
    norm = RMSNorm(config, 16, eps=1e-6)
    assert norm.weight.sequence_parallel is sequence_parallel
    assert norm.weight.dtype == torch.bfloat16


def test_packed_bfloat16_differentiates_as_exactly_as_its_inputs_allow() -> None:
    """Against float64 on the same rounded inputs: one rounding of the output, a few of the gradients."""
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


def test_packed_bfloat16_is_the_same_with_and_without_gradients() -> None:
    inputs = [x.bfloat16().requires_grad_() for x in _inputs(T)]
    bounds = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 4, T], dtype=torch.int32))
    with_gradients = SdpaCoreAttention()(*inputs, packed_seq_params=bounds)
    with torch.no_grad():
        assert torch.equal(with_gradients, SdpaCoreAttention()(*inputs, packed_seq_params=bounds))
