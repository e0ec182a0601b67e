"""Triton kernel of `kernels.attend_with_lse`, for CUDA. `TRITON_INTERPRET=1` runs it on a CPU.

torch's `scaled_dot_product_attention` returns no log of the normalizer, which merging needs.
FlexAttention does, but it is compiled anew for new shapes and cannot be interpreted without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_megatron.models.attention.sums import PART_KEYS, wide_dtype


@triton.jit
def add_keys(scores, values, largest, total, summed, WIDE: tl.constexpr):
    """Add a block of keys to a softmax: its largest score, the sum of its weights, and the values
    that they weigh. A query that has seen no key keeps a largest score of -inf.
    """
    larger = tl.maximum(largest, tl.max(scores, axis=1))
    shift = tl.where(larger == -float("inf"), 0.0, larger)  # -inf minus -inf is not a number
    weights = tl.exp(scores - shift[:, None])
    kept = tl.exp(largest - shift)
    added = tl.dot(weights.to(values.dtype), values, input_precision="ieee", out_dtype=WIDE)
    return larger, total * kept + tl.sum(weights, axis=1), summed * kept[:, None] + added


@triton.jit
def _attend_part(
    query,
    key,
    value,
    bias,
    starts,
    out,
    lse,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    bias_batch,
    bias_row,
    num_heads,
    num_queries,
    num_keys,
    queries_per_bias,
    SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    SCANNED: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Attend with one block of queries over one part of the keys, into `out` and `lse` [.., M]."""
    num_blocks = tl.cdiv(num_queries, QUERIES)
    pair = tl.program_id(0) // num_blocks
    batch, head = (pair // num_heads).to(tl.int64), (pair % num_heads).to(tl.int64)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    rows = tl.program_id(0) % num_blocks * QUERIES + tl.arange(0, QUERIES)
    dims, keys = tl.arange(0, HEAD_BLOCK), tl.arange(0, KEYS)
    is_row, is_dim = rows < num_queries, dims < HEAD_DIM

    # Lanes are read at the length of the longest: skip keys after the last that a query here sees.
    biases = bias + batch * bias_batch + (rows // queries_per_bias)[:, None] * bias_row
    begin, limit = part * PART, tl.minimum(part * PART + PART, num_keys)
    end = begin
    for start in range(begin, limit, SCANNED):
        at = start + tl.arange(0, SCANNED)
        is_pair = is_row[:, None] & (at < limit)[None, :]
        seen = tl.load(biases + at[None, :], mask=is_pair, other=-float("inf"))
        is_seen = tl.max(seen.to(WIDE), axis=0) > -float("inf")
        end = tl.maximum(end, tl.max(tl.where(is_seen, at + 1, begin), axis=0))

    places = batch * query_batch + head * query_head + rows[:, None] * query_row + dims[None, :]
    queries = tl.load(query + places, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    if HAS_STARTS:
        first = tl.load(starts + batch).to(tl.int64)
        key += first * key_row
        value += first * value_row
    scale = tl.full([1, 1], SCALE, WIDE)
    largest = tl.full([QUERIES], -float("inf"), WIDE)
    total = tl.zeros([QUERIES], WIDE)
    summed = tl.zeros([QUERIES, HEAD_BLOCK], WIDE)
    for start in range(begin, end, KEYS):
        at = start + keys
        is_key = at < end
        keys_at = key + at[None, :] * key_row + dims[:, None]
        turned = tl.load(keys_at, mask=is_dim[:, None] & is_key[None, :], other=0.0)
        scores = tl.dot(queries, turned, input_precision="ieee", out_dtype=WIDE) * scale
        is_pair = is_row[:, None] & is_key[None, :]
        scores += tl.load(biases + at[None, :], mask=is_pair, other=-float("inf")).to(WIDE)
        values_at = value + at[:, None] * value_row + dims[None, :]
        chunk = tl.load(values_at, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        largest, total, summed = add_keys(scores, chunk, largest, total, summed, WIDE)

    cells = (pair.to(tl.int64) * num_queries + rows) * num_parts + part
    summed /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(lse + cells, largest + tl.log(total), mask=is_row)
    places = cells[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + places, summed, mask=is_row[:, None] & is_dim[None, :])


@triton.jit
def _merge_parts(
    outs,
    lses,
    out,
    lse,
    num_parts,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Merge the parts of one query in order: parts at the end that it does not see change no
    bit.
    """
    cell = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HEAD_BLOCK)
    lses += cell * num_parts
    outs += cell * num_parts * HEAD_DIM
    largest = tl.load(lses)
    for part in range(1, num_parts):
        largest = tl.maximum(largest, tl.load(lses + part))
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.zeros([1], WIDE)
    summed = tl.zeros([HEAD_BLOCK], WIDE)
    for part in range(0, num_parts):
        weight = tl.exp(tl.load(lses + part) - shift)
        total += weight
        summed += weight * tl.load(outs + part * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    summed /= tl.where(total == 0.0, 1.0, total)
    tl.store(lse + cell + tl.arange(0, 1), largest + tl.log(total))
    tl.store(out + cell * HEAD_DIM + dims, summed, mask=dims < HEAD_DIM)


def triton_wide(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's form of `wide_dtype`."""
    return tl.float64 if wide_dtype(dtype) == torch.float64 else tl.float32


# Bytes of a block of queries, keys or values. A block of each, and the next keys and values, fit
# into the shared memory of compute capability 8.9, the smallest that tests compile for: 99 KiB.
_BLOCK_BYTES = 16384
_MAX_AHEAD_BYTES = 1024  # in a key: the next blocks of longer keys do not fit
_SCANNED_BIASES = 8192  # biases of one load, at most 64 for each thread


def head_block_of(head_dim: int) -> int:
    """Return the dimensions of a head that a program computes, a power of two."""
    return max(triton.next_power_of_2(head_dim), 16)


def block_of(dtype: torch.dtype, head_dim: int) -> int:
    """Return the most queries of a program, and the keys of a block."""
    return min(max(_BLOCK_BYTES // (head_block_of(head_dim) * dtype.itemsize), 16), 64)


def stages_of(dtype: torch.dtype, head_dim: int) -> int:
    """Return the blocks of keys and values that a program holds: its own, and one loaded ahead."""
    return 2 if head_block_of(head_dim) * dtype.itemsize <= _MAX_AHEAD_BYTES else 1


def options_of(dtype: torch.dtype, num_queries: int, head_dim: int, part: int) -> dict[str, object]:
    """Return the compile-time arguments of `_attend_part` for queries of `dtype`, and how it is
    launched. A program has `part` keys.
    """
    head_block, most = head_block_of(head_dim), block_of(dtype, head_dim)
    block = min(max(triton.next_power_of_2(num_queries), 16), most)
    return {
        "SCALE": head_dim**-0.5,
        "HEAD_DIM": head_dim,
        "HEAD_BLOCK": head_block,
        "QUERIES": block,
        "KEYS": most,
        "PART": part,
        "SCANNED": min(_SCANNED_BIASES // block, part),
        "WIDE": triton_wide(dtype),
        "num_stages": stages_of(dtype, head_dim),
        "num_warps": 4 if block == 16 else 8,  # with 4, a larger block does not fit into registers
    }


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    starts_B: Tensor | None,
    whole: tuple[Tensor, Tensor],
    parts: tuple[Tensor, Tensor],
    part: int = PART_KEYS,
) -> None:
    """Write the result of `kernels.attend_with_lse` to `whole`: see `sums.result_buffers`.

    With `starts_B`, the keys of row b begin so many places after the first of `key`. A program has
    `part` keys.
    """
    num_rows, num_heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    bias = bias.expand(num_rows, -1, -1, -1)
    num_parts = triton.cdiv(num_keys, part)
    options = options_of(query.dtype, num_queries, head_dim, part)
    num_blocks = triton.cdiv(num_queries, options["QUERIES"])
    _attend_part[(num_rows * num_heads * num_blocks, num_parts)](  # pyright: ignore[reportIndexIssue]
        query,
        key,
        value,
        bias,
        bias if starts_B is None else starts_B,  # any pointer: without starts it is not read
        *parts,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        bias.stride(0),
        bias.stride(2),
        num_heads,
        num_queries,
        num_keys,
        num_queries // bias.shape[2],
        **options,
        HAS_STARTS=starts_B is not None,
    )
    merge_parts(parts, whole, options)


def merge_parts(
    parts: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], options: dict[str, object]
) -> None:
    """Write the merged parts to `whole`. See `sums.result_buffers`."""
    if parts is not whole:
        shared = {name: options[name] for name in ("HEAD_DIM", "HEAD_BLOCK", "WIDE")}
        num_cells, num_parts = whole[1].numel(), parts[1].shape[-1]
        _merge_parts[(num_cells,)](*parts, *whole, num_parts, **shared)  # pyright: ignore[reportIndexIssue]
