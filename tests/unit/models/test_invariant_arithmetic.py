"""Bit for bit: a row's result in every part of the invariant arithmetic is the same whatever rows are beside it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tiny_models import make_tiny_hf
from tlt_megatron.models.attention.invariant_attention import attend_block, block_bias, merge_blocks
from tlt_megatron.models.attention.kernels import attend_with_lse
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.invariant_arithmetic import (
    InvariantMatrix,
    InvariantNorm,
    RowTiles,
    cancelling,
    gate_silu,
    invariant_arithmetic,
)
from tlt_megatron.models.layers import RmsNorm, apply_rope_, apply_rope_unfused_
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.runtime.device import has_triton

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
CLOSE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
    torch.float64: {"atol": 1e-12, "rtol": 1e-12},
}


def differing_batches(run: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> list[int]:
    """Sizes of random batches of rows of x for which `run` does not give their rows of `expected`."""
    draw, found = random.Random(0), []
    for size in [*range(1, 20), 33, 64, 100, 257, 300]:
        rows = torch.tensor([draw.randrange(x.shape[0]) for _ in range(size)])
        if not torch.equal(run(x[rows]), expected[rows]):
            found.append(size)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_out, num_in", [(128, 64), (64, 1536), (24, 100), (7, 40)])
def test_a_row_of_a_product_is_the_same_in_every_batch(
    num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    weight = cancelling(num_out, num_in, 3, 1.0).to(dtype)
    bias = torch.linspace(-1, 1, num_out).to(dtype) * 1e-6
    matrix = InvariantMatrix(weight, bias)
    x = cancelling(300, num_in, 4, -1.0).to(dtype)
    expected = torch.cat([matrix(row) for row in x.split(1)])
    assert expected.abs().max() > 0
    assert differing_batches(matrix, x, expected) == []
    addend = torch.randn(300, num_out).to(dtype)
    assert torch.equal(matrix(x, addend), expected + addend)


def test_without_tiles_a_row_of_a_product_differs() -> None:
    """Else the test above shows nothing."""
    matrix = Matrix(cancelling(64, 1536, 3, 1.0))
    x = cancelling(300, 1536, 4, -1.0)
    expected = torch.cat([matrix(row) for row in x.split(1)])
    assert differing_batches(matrix, x, expected)


def test_tiles_hold_all_rows_with_little_to_spare() -> None:
    tiles = RowTiles(16, 32, torch.float32, has_bias=False)
    assert {16, 64} <= set(tiles.sizes)
    for num_rows in range(1, 600):
        cover = tiles.cover(num_rows)
        assert set(cover) <= set(tiles.sizes)
        assert sum(cover[:-1]) < num_rows <= sum(cover) <= max(1.5 * num_rows, min(tiles.sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 64, 100])
def test_what_lies_between_is_the_same_in_every_batch(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2 * size, generator=generator).to(dtype)
    weight = torch.randn(2 * size, generator=generator).to(dtype)
    norm = InvariantNorm(1e-6, dtype, CPU)

    def gate(rows: Tensor) -> Tensor:
        return gate_silu(rows[:, :size], rows[:, size:])

    def rotate(rows: Tensor) -> Tensor:
        heads = rows.view(-1, 2, size).clone()
        apply_rope_unfused_(heads, weight[:size].cos(), weight[size:].sin())
        return heads.view(rows.shape)

    for run in (lambda rows: norm(rows, weight), gate, rotate):
        expected = torch.cat([run(row) for row in x.split(1)])
        assert differing_batches(run, x, expected) == []

    torch.testing.assert_close(
        norm(x, weight), RmsNorm(1e-6, dtype, CPU)(x, weight), **CLOSE[dtype]
    )
    gates, ups = x.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gates) * ups
    torch.testing.assert_close(gate(x), expected, **CLOSE[dtype])
    plain = x.view(-1, 2, size).clone()
    apply_rope_(plain, weight[:size].cos(), weight[size:].sin())
    torch.testing.assert_close(rotate(x), plain.view(x.shape), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_add_up_to_attention_over_all_keys(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    block, num_blocks, position = 16, 5, 70
    query, key, value = (
        torch.randn(1, 2, size, 8, generator=generator).to(dtype)
        for size in (3, block * num_blocks, block * num_blocks)
    )

    def merged(num_read: int) -> Tensor:
        bias, is_hidden = block_bias(torch.tensor([[position] * 3]), num_read, block, dtype)
        parts = [
            attend_block(query, key[:, :, rows], value[:, :, rows], bias[:, None, m])
            for m, rows in enumerate(slice(i, i + block) for i in range(0, num_read * block, block))
        ]
        out, lse = (torch.stack(tensors, dim=1) for tensors in zip(*parts, strict=True))
        return merge_blocks(out, lse.masked_fill(is_hidden.unsqueeze(2), -torch.inf))

    seen = slice(0, position + 1)
    expected, _ = attend_with_lse(query, key[:, :, seen], value[:, :, seen], None)
    torch.testing.assert_close(merged(num_blocks), expected, **CLOSE[dtype])


@pytest.mark.parametrize("num_kv_heads, repeat, size", [(2, 4, 8), (1, 3, 5), (1, 2, 18)])
def test_blocks_that_are_hidden_change_no_bit(num_kv_heads: int, repeat: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    out_all = torch.randn(3, 80, num_kv_heads, repeat, size, generator=generator)
    lse_all = 3 * torch.randn(3, 80, num_kv_heads, repeat, generator=generator)
    for num_seen in (1, 2, 3, 5, 6, 7, 13, 30, 37, 70):
        lse = lse_all.clone()
        lse[:, num_seen:] = -torch.inf
        expected = merge_blocks(out_all[:, :num_seen], lse[:, :num_seen])
        for num_read in range(num_seen, 80):
            assert torch.equal(merge_blocks(out_all[:, :num_read], lse[:, :num_read]), expected)


@pytest.mark.skipif(has_triton(), reason="tests/kernels and tests/gpu run the kernels")
def test_a_gpu_without_triton_is_refused(tmp_path) -> None:
    config = load_model_config(make_tiny_hf(tmp_path, "llama", num_layers=1))
    with pytest.raises(ValueError, match=r"must be false on device 'cuda' without Triton"):
        invariant_arithmetic(config, torch.float32, torch.device("cuda"))
