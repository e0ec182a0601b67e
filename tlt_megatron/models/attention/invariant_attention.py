"""Batch-invariant attention on a CPU: a query's bits do not depend on its pass.

Block m of a sequence is the page_size positions from m * page_size on. For each block, the kernel
runs over exactly these keys in this order, in a copy, with hidden keys masked. The number of query
rows is a multiple of 4: then a row's place does not matter, which `check_attention` checks. The
blocks are added pairwise, as a binary tree over their numbers; a hidden block adds exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention import Attention
from tlt_megatron.models.attention.kernels import attend_with_lse
from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.attention.tables import TableRead, table_lanes
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.kv_cache import KvCache

_QUERY_ROWS = 4  # with fewer rows the kernel multiplies in another way
_QUERIES = 64  # queries of a row at once: bounds the memory of their parts
MAX_ROWS = 64  # rows at once: bounds the memory of their copied keys and values


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend over one block. Without `bias` [X, 1, R or 1, S] the bits would differ."""
    assert bias is not None
    num_rows = query.shape[2]
    padding = -num_rows % _QUERY_ROWS
    if padding:
        query = F.pad(query, (0, 0, 0, padding))
        if bias.shape[2] > 1:
            bias = F.pad(bias, (0, 0, 0, padding))
    out, lse = attend_with_lse(query, key, value, bias)
    return (out[:, :, :num_rows], lse[:, :, :num_rows]) if padding else (out, lse)


def merge_blocks(out_BMKRH: Tensor, lse_BMKR: Tensor) -> Tensor:
    """Merge M blocks in order. A block with lse -inf adds nothing; its output must be finite."""
    if out_BMKRH.shape[1] == 1:
        return out_BMKRH.squeeze(1)
    weights_BMKR = (lse_BMKR - lse_BMKR.amax(dim=1, keepdim=True)).exp_()
    summed_BKRH = _sum_pairs_(out_BMKRH * weights_BMKR.unsqueeze(-1))
    total_BKR1 = _sum_pairs_(weights_BMKR).unsqueeze(-1)
    return summed_BKRH.div_(total_BKR1).to(out_BMKRH.dtype)


def _sum_pairs_(parts: Tensor) -> Tensor:
    """Sum over dim 1 in pairs, in place: unlike in `torch.sum`, zeros at its end change no bit."""
    while parts.shape[1] > 1:
        parts[:, :-1:2].add_(parts[:, 1::2])
        parts = parts[:, ::2]
    return parts.squeeze(1)


def block_bias(
    positions_BR: Tensor, num_blocks: int, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the bias [B, M, R, S] of blocks 0..M-1, and which of them are hidden [B, M, R].

    A hidden block is not masked, so that its output is finite. The caller must replace its lse by
    -inf.
    """
    starts_M1 = torch.arange(num_blocks, device=positions_BR.device).unsqueeze(1) * block
    is_hidden_BMR = starts_M1 > positions_BR.unsqueeze(1)
    columns_MS = starts_M1 + torch.arange(block, device=positions_BR.device)
    is_masked = columns_MS.unsqueeze(1) > positions_BR[:, None, :, None]
    is_masked &= ~is_hidden_BMR.unsqueeze(-1)
    bias = torch.zeros(is_masked.shape, dtype=dtype, device=positions_BR.device)
    return bias.masked_fill_(is_masked, -torch.inf), is_hidden_BMR


class _Blocks:
    """Attention of a `TableRead`, block by block. M counts blocks, R the queries of a kv head."""

    def __init__(self, cache: KvCache, table_XS: Tensor, positions_XR: Tensor) -> None:
        self._cache, block = cache, cache.page_size
        self._num_rows, self._num_queries = positions_XR.shape
        self.num_tokens = positions_XR.numel()
        self._num_blocks = int(positions_XR.max()) // block + 1
        width = self._num_blocks * block
        table_XS = table_XS[:, :width]  # columns after all positions may hold any slot
        self._slots = F.pad(table_XS, (0, width - table_XS.shape[1])).flatten()
        if self._num_queries > 1:  # otherwise one row of the bias serves all heads
            positions_XR = positions_XR.repeat_interleave(cache.num_heads_per_kv, dim=1)
        bias_XMRS, is_hidden_XMR = block_bias(
            positions_XR, self._num_blocks, block, cache.bias_T.dtype
        )
        self._bias = bias_XMRS.flatten(0, 1).unsqueeze(1)
        self._is_hidden = is_hidden_XMR.unsqueeze(2) if is_hidden_XMR.any() else None

    def attend(self, layer: int, query_PNH: Tensor) -> Tensor:
        """Return [P, N*H]."""
        kv_KTH = self._cache.layers[layer].index_select(1, self._slots)
        kv = kv_KTH.unflatten(1, (-1, self._cache.page_size)).transpose(0, 1)
        query = query_PNH.unflatten(1, (self._cache.num_kv_heads, -1))
        query = query.unflatten(0, (self._num_rows, -1)).transpose(1, 2).flatten(2, 3)
        query = query.unsqueeze(1).expand(-1, self._num_blocks, -1, -1, -1).flatten(0, 1)
        key, value = kv.chunk(2, dim=1)
        parts = attend_block(query, key, value, self._bias)
        out, lse = (part.unflatten(0, (self._num_rows, -1)) for part in parts)
        if self._is_hidden is not None:
            lse = lse.masked_fill(self._is_hidden, -torch.inf)
        by_query = merge_blocks(out, lse).unflatten(2, (self._num_queries, -1))
        return by_query.transpose(1, 2).flatten(0, 1).flatten(1)


class InvariantAttention:
    """See `tables.AttendTables`."""

    def __init__(self, cache: KvCache, slots_P: Tensor, reads: Sequence[TableRead]) -> None:
        self._cache = cache
        self._slots_P = slots_P
        self._parts: list[_Blocks] = []
        for read in reads:
            rows = (tensor.split(MAX_ROWS) for tensor in read)
            self._parts += [
                _Blocks(cache, table_XS, positions_XR)
                for table_XS, all_positions_XR in zip(*rows, strict=True)
                for positions_XR in all_positions_XR.split(_QUERIES, dim=1)
            ]
        self._sizes = [part.num_tokens for part in self._parts]

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        self._cache.write(layer, self._slots_P, kv_PKH)
        queries = query_PNH.split(self._sizes)
        pairs = zip(self._parts, queries, strict=True)
        return torch.cat([part.attend(layer, query) for part, query in pairs])


def invariant_lanes(view: LaneView, slots_P: Tensor, bias_BRS: Tensor) -> Attention:
    """See `lanes.LaneTreeAttention`. Slots are compared with positions on the host."""
    positions_BR = (bias_BRS == 0).sum(dim=2) - 1
    places_BR = slots_P.view(view.num_rows, -1) - view.starts_B.unsqueeze(1)
    if not torch.equal(places_BR, positions_BR):
        return table_lanes(InvariantAttention, view, slots_P, bias_BRS)
    # All queries of a chain see the keys of their lane in the same order.
    columns_S = torch.arange(view.lane, device=view.cache.device)
    read = TableRead(view.starts_B.unsqueeze(1) + columns_S, positions_BR)
    return InvariantAttention(view.cache, slots_P, [read])


def check_attention(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise RuntimeError if a query's result here depends on the call's other queries or blocks."""
    block, repeat = 64, config.num_heads // config.num_kv_heads
    shape = (3, config.num_kv_heads, 2 * block, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    # Values that cancel: see `invariant_arithmetic.cancelling`.
    key = torch.cat((key[:, :, : block // 2], key[:, :, : block // 2].flip(2)), dim=2)
    value = torch.cat((value[:, :, : block // 2], -value[:, :, : block // 2].flip(2)), dim=2)
    bias = torch.zeros(3, 1, 1, block, dtype=dtype)
    bias[1, ..., block // 3 :] = -torch.inf
    pieces = query.split(_QUERY_ROWS, dim=2)
    expected = [attend_block(piece.contiguous(), key, value, bias) for piece in pieces]
    expected = [torch.cat(parts, dim=2) for parts in zip(*expected, strict=True)]
    for num_queries in {repeat, *(size * repeat for size in (2, 5, 8, 17, 32))}:
        for rows in (slice(0, 3), slice(1, 2)):
            part = query[rows, :, :num_queries]
            found = attend_block(part.contiguous(), key[rows], value[rows], bias[rows])
            require_equal(
                found,
                [x[rows, :, :num_queries] for x in expected],
                f"{dtype} attention of {part.shape[2]} queries over {block} keys is not that of"
                f" {_QUERY_ROWS} queries at a time",
            )


def require_equal(found: Iterable[Tensor], expected: Iterable[Tensor], otherwise: str) -> None:
    """Raise RuntimeError if tensors differ; `otherwise` is what that means on this machine."""
    if not all(map(torch.equal, found, expected)):
        raise RuntimeError(f"rollout.batch_invariant=True: on this machine {otherwise}")
