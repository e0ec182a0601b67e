"""Batch-invariant attention on CUDA: a Triton kernel of single tokens over keys in the order of a
slot table.

One program takes the query heads of one token and one kv head. So a token's bits depend on its
query and its keys in order, on nothing else of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tlt_megatron.models.attention.fused_kernel import (
    add_keys,
    block_of,
    head_block_of,
    merge_parts,
    stages_of,
    triton_wide,
)
from tlt_megatron.models.attention.sums import PART_KEYS, result_buffers
from tlt_megatron.models.attention.tables import TableRead
from tlt_megatron.models.kv_cache import KvCache

_TOKENS = 512  # tokens of one call: bounds the memory of their parts


class OrderedAttention:
    """See `tables.AttendTables`."""

    def __init__(self, cache: KvCache, slots_P: Tensor, reads: Sequence[TableRead]) -> None:
        self._cache = cache
        self._slots_P = slots_P
        tables, rows = [], []
        for table_XS, positions_XR in reads:
            numbers_X = torch.arange(table_XS.shape[0], device=cache.device) + sum(map(len, tables))
            rows.append(numbers_X.unsqueeze(1).expand_as(positions_XR).flatten())
            tables.append(table_XS)
        self._table_XS = tables[0]
        if len(tables) > 1:
            lines = [row_S for table_XS in tables for row_S in table_XS]
            self._table_XS = pad_sequence(lines, batch_first=True)
        self._rows_P = torch.cat(rows)
        self._lengths_P = torch.cat([read.positions_XR.flatten() for read in reads]) + 1

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        self._cache.write(layer, self._slots_P, kv_PKH)
        kv_KTH = self._cache.layers[layer]
        return attend_ordered(query_PNH, kv_KTH, self._table_XS, self._rows_P, self._lengths_P)


@triton.jit
def _attend_ordered(
    query,
    key,
    value,
    table,
    rows,
    lengths,
    out,
    lse,
    query_token,
    query_head,
    kv_head,
    kv_slot,
    table_row,
    num_heads,
    SCALE: tl.constexpr,
    REPEAT: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend with the queries of one kv head of one token over one part of its keys."""
    token = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    heads, dims = tl.arange(0, QUERIES), tl.arange(0, HEAD_BLOCK)
    is_head, is_dim = heads < REPEAT, dims < HEAD_DIM
    places = token * query_token + (head * REPEAT + heads)[:, None] * query_head + dims[None, :]
    queries = tl.load(query + places, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    slots_at = table + tl.load(rows + token) * table_row
    limit = tl.minimum(tl.load(lengths + token), part * PART + PART)
    scale = tl.full([1, 1], SCALE, WIDE)
    largest = tl.full([QUERIES], -float("inf"), WIDE)
    total = tl.zeros([QUERIES], WIDE)
    summed = tl.zeros([QUERIES, HEAD_BLOCK], WIDE)
    for start in range(part * PART, limit, KEYS):
        at = start + tl.arange(0, KEYS)
        is_key = at < limit
        slots = head * kv_head + tl.load(slots_at + at, mask=is_key, other=0) * kv_slot
        turned = tl.load(
            key + slots[None, :] + dims[:, None], mask=is_dim[:, None] & is_key[None, :], other=0.0
        )
        scores = tl.dot(queries, turned, input_precision="ieee", out_dtype=WIDE) * scale
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        chunk = tl.load(
            value + slots[:, None] + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        largest, total, summed = add_keys(scores, chunk, largest, total, summed, WIDE)

    cells = ((token * num_heads + head) * REPEAT + heads) * num_parts + part
    summed /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(lse + cells, largest + tl.log(total), mask=is_head)
    places = cells[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + places, summed, mask=is_head[:, None] & is_dim[None, :])


def ordered_options(dtype: torch.dtype, repeat: int, head_dim: int) -> dict[str, object]:
    """Return the compile-time arguments of `_attend_ordered`. A kv head has `repeat` query
    heads.
    """
    return {
        "SCALE": head_dim**-0.5,
        "REPEAT": repeat,
        "QUERIES": max(triton.next_power_of_2(repeat), 16),
        "HEAD_DIM": head_dim,
        "HEAD_BLOCK": head_block_of(head_dim),
        "KEYS": block_of(dtype, head_dim),
        "PART": PART_KEYS,
        "WIDE": triton_wide(dtype),
        "num_stages": stages_of(dtype, head_dim),
    }


def attend_ordered(
    query_PNH: Tensor, kv_KTH: Tensor, table_XS: Tensor, rows_P: Tensor, lengths_P: Tensor
) -> Tensor:
    """Return [P, N * H]. Token p sees the first `lengths_P[p]` slots of table row `rows_P[p]`.

    `kv_KTH` has 2K heads, keys first. A token that sees no key has output 0.
    """
    outs = [
        _launch(query, kv_KTH, table_XS, rows, lengths)
        for query, rows, lengths in zip(
            *(tensor.split(_TOKENS) for tensor in (query_PNH, rows_P, lengths_P)), strict=True
        )
    ]
    return torch.cat(outs).flatten(1)


def _launch(query: Tensor, kv: Tensor, table: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_parts = kv.shape[0] // 2, triton.cdiv(table.shape[1], PART_KEYS)
    key, value = kv.chunk(2)
    whole, parts = result_buffers(query, table.shape[1])
    options = ordered_options(query.dtype, num_heads // num_kv_heads, head_dim)
    _attend_ordered[(num_tokens * num_kv_heads, num_parts)](  # pyright: ignore[reportIndexIssue]
        query,
        key,
        value,
        table,
        rows,
        lengths,
        *parts,
        *query.stride()[:2],
        *kv.stride()[:2],
        table.stride(0),
        num_kv_heads,
        **options,
    )
    merge_parts(parts, whole, options)
    return whole[0]
