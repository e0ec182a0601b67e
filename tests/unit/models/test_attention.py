"""Attention over parts of the keys, merged, is attention over all of them."""

from __future__ import annotations

import pytest
import torch

from tlt_megatron.models.attention.kernels import attend_with_lse, merge_attention


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_merged_parts_equal_attention_over_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 4, 16, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 3, 30, 16, generator=generator, dtype=torch.float64) * 2
    expected = torch.softmax(query @ key.transpose(-1, -2) / 4, dim=-1) @ value
    parts = [
        attend_with_lse(
            query.to(dtype),
            key[:, :, start:end].to(dtype),
            value[:, :, start:end].to(dtype),
            None,
        )
        for start, end in ((0, 7), (7, 8), (8, 30))
    ]
    out, lse = (torch.stack(tensors, dim=1) for tensors in zip(*parts, strict=True))
    empty = torch.full_like(lse[:, :1], -torch.inf)
    merged = merge_attention(torch.cat((out, out[:, :1]), 1), torch.cat((lse, empty), 1))
    assert merged.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(merged.double(), expected, atol=tolerance, rtol=tolerance)
