"""Gradients of the attention over the steps of an unrolled draft, and its twin in chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tlt_megatron.models.attention.kernels import (
    attend_in_chunks,
    attend_with_lse,
    differentiate_causal,
    differentiate_in_chunks,
)
from tlt_megatron.models.attention.packed import UnrolledAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 6


def random_steps(
    num_rows: int, num_steps: int, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(num_rows)

    def draw(num_heads: int) -> Tensor:
        shape = (num_rows, num_heads, HEAD_DIM)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [(draw(NUM_HEADS), draw(2 * NUM_KV_HEADS)) for _ in range(num_steps)]


def test_gradients_equal_finite_differences() -> None:
    lengths = (3, 1)
    steps = random_steps(4, 3)
    flat = [tensor.requires_grad_() for step in steps for tensor in step]

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        attention = UnrolledAttention(lengths)
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return tuple(attention.attend(0, query, kv) for query, kv in pairs)

    assert torch.autograd.gradcheck(outputs, flat)


@pytest.mark.parametrize("chunk", [2, 3, 512])
def test_chunked_twin_equals_the_kernel(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 7, 4, generator=generator).double() for _ in range(4)]
    query, key, value, grad = tensors
    out, lse = attend_with_lse(query, key, value, is_causal=True)
    chunked = attend_in_chunks(query, key, value, is_causal=True, chunk=chunk)
    torch.testing.assert_close(chunked, (out, lse))
    expected = differentiate_causal(grad, query, key, value, out, lse)
    actual = differentiate_in_chunks(grad, query, key, value, out, lse, chunk=chunk)
    torch.testing.assert_close(actual, tuple(expected))
    bias = torch.zeros(7, 7).double().masked_fill_(torch.ones(7, 7).triu(1) > 0, -torch.inf)
    chunked = attend_in_chunks(query, key, value, bias.expand(1, 1, 7, 7), chunk=chunk)
    torch.testing.assert_close(chunked, (out, lse))
