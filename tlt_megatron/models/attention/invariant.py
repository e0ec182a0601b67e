"""Batch-invariant attention: a query's bits do not depend on its pass. Used by `invariant.invariant_arithmetic`.

Block m of a sequence is the page_size positions from m * page_size on, in any slots. For each block, the kernel runs over
exactly these keys in this order, with hidden keys masked. The number of query rows is a multiple of 4: then a row's
place does not matter, which `check_attention` checks. The blocks are added pairwise, as a binary tree over their numbers;
a hidden block adds exact zeros. So prefill, decoding over pages or lanes, and verifying a chain or a tree give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention.kernels import attend_with_lse
from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.attention.paged import PagedAttention, PrefillSegment
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.kv_cache import KvCache

_QUERY_ROWS = 4  # with fewer rows the kernel multiplies in another way
_PREFILL_QUERIES = 64  # queries at once: bounds the memory of their parts


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run `layers.attend_with_lse` over one block. `bias` [X, 1, R or 1, S] is required: without it the bits differ."""
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
    """Merge the M blocks of each context, in order. A block with lse -inf adds nothing, but its output must be finite."""
    if out_BMKRH.shape[1] == 1:
        return out_BMKRH.squeeze(1)
    weights_BMKR = (lse_BMKR - lse_BMKR.amax(dim=1, keepdim=True)).exp_()
    total_BKR = _sum_pairs(weights_BMKR)
    summed_BKRH = _sum_pairs(out_BMKRH * weights_BMKR.unsqueeze(-1))
    return summed_BKRH.div_(total_BKR.unsqueeze(-1)).to(out_BMKRH.dtype)


def _sum_pairs(parts: Tensor) -> Tensor:
    """Sum over dim 1 in pairs. Zeros at its end change no bit; `torch.sum` may add a longer dim in another order."""
    while (num_parts := parts.shape[1]) > 1:
        pairs = parts[:, : num_parts - 1 : 2] + parts[:, 1::2]
        parts = torch.cat((pairs, parts[:, -1:]), dim=1) if num_parts % 2 else pairs
    return parts.squeeze(1)


def block_bias(
    positions_BR: Tensor, num_blocks: int, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the bias [B, M, R, S] of blocks 0..M-1 for queries at `positions_BR`, and which blocks are hidden [B, M, R].

    A hidden block is not masked, so that its output is finite. The caller must replace its lse by -inf.
    """
    starts_M1 = torch.arange(num_blocks, device=positions_BR.device).unsqueeze(1) * block
    is_hidden_BMR = starts_M1 > positions_BR.unsqueeze(1)
    columns_MS = starts_M1 + torch.arange(block, device=positions_BR.device)
    is_masked = columns_MS.unsqueeze(1) > positions_BR[:, None, :, None]
    is_masked &= ~is_hidden_BMR.unsqueeze(-1)
    bias = torch.zeros(is_masked.shape, dtype=dtype, device=positions_BR.device)
    return bias.masked_fill_(is_masked, -torch.inf), is_hidden_BMR


def attend_rows(query_BKRH: Tensor, kv_KBMSH: Tensor, bias_BMRS: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's attention over each of its blocks: out [B, M, K, R, H] and lse [B, M, K, R].

    `kv_KBMSH` has 2K heads. The kernel allows only two batch dims with arbitrary strides, so with more than one row it
    runs once per kv head.
    """
    num_rows, num_kv_heads = query_BKRH.shape[:2]
    num_blocks = kv_KBMSH.shape[2]
    if num_rows == 1:
        kv_MKSH = kv_KBMSH[:, 0].transpose(0, 1)
        out, lse = attend_block(
            query_BKRH.expand(num_blocks, -1, -1, -1),
            kv_MKSH[:, :num_kv_heads],
            kv_MKSH[:, num_kv_heads:],
            bias_BMRS[0].unsqueeze(1),
        )
        return out.unsqueeze(0), lse.unsqueeze(0)
    parts = [
        attend_block(
            query_BKRH[:, head].unsqueeze(1).expand(-1, num_blocks, -1, -1),
            kv_KBMSH[head],
            kv_KBMSH[num_kv_heads + head],
            bias_BMRS,
        )
        for head in range(num_kv_heads)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.stack(outs, dim=2), torch.stack(lses, dim=2)


def _by_kv_head(query_PNH: Tensor, num_rows: int, num_kv_heads: int) -> Tensor:
    """Return queries grouped by kv head: [B, K, R * query heads per kv head, H]."""
    num_tokens, num_heads, head_dim = query_PNH.shape
    repeat = num_heads // num_kv_heads
    query = query_PNH.view(num_rows, num_tokens // num_rows, num_kv_heads, repeat, head_dim)
    return query.transpose(1, 2).reshape(num_rows, num_kv_heads, -1, head_dim)


def _by_token(out_BKRH: Tensor, num_tokens: int) -> Tensor:
    """Return [P, N*H], the inverse of `_by_kv_head`."""
    num_rows, num_kv_heads, _, head_dim = out_BKRH.shape
    num_queries = num_tokens // num_rows
    out = out_BKRH.view(num_rows, num_kv_heads, num_queries, -1, head_dim).transpose(1, 2)
    return out.reshape(num_tokens, -1)


class _Sight:
    """`block_bias` repeated for the query heads of a kv head, made once for all layers."""

    def __init__(self, positions_BR: Tensor, num_blocks: int, block: int, dtype: torch.dtype):
        self._made = block_bias(positions_BR, num_blocks, block, dtype)
        self._repeated: tuple[Tensor, Tensor] | None = None

    def attend(self, query_BKRH: Tensor, kv_KBMSH: Tensor, repeat: int) -> Tensor:
        """Return attention over all blocks, [B, K, R, H]."""
        if self._repeated is None:
            bias, is_hidden = self._made
            if repeat > 1:
                bias = bias.repeat_interleave(repeat, dim=2)
                is_hidden = is_hidden.repeat_interleave(repeat, dim=2)
            self._repeated = bias, is_hidden.unsqueeze(2)
        bias, is_hidden = self._repeated
        out, lse = attend_rows(query_BKRH, kv_KBMSH, bias)
        return merge_blocks(out, lse.masked_fill(is_hidden, -torch.inf))


class InvariantPrefillAttention:
    """See `attention.PrefillAttention`."""

    def __init__(self, cache: KvCache, segments: Sequence[PrefillSegment]) -> None:
        self._cache = cache
        self._slots_P = torch.cat([segment.new_slots_C for segment in segments])
        block = cache.page_size
        self._slots: list[Tensor] = []  # of each segment's blocks, the last padded with any slot
        self._groups: list[list[tuple[slice, int, _Sight]]] = []  # tokens, num_blocks, visibility
        start = 0
        for segment in segments:
            num_new, num_all = segment.new_slots_C.numel(), segment.context_slots_S.numel()
            filler = segment.context_slots_S[:1].expand(-num_all % block)
            self._slots.append(torch.cat((segment.context_slots_S, filler)))
            groups = []
            for first in range(num_all - num_new, num_all, _PREFILL_QUERIES):
                end = min(first + _PREFILL_QUERIES, num_all)
                tokens = slice(start, start + end - first)
                start = tokens.stop
                num_blocks = cache.pages_for(end)
                positions_1R = torch.arange(first, end, device=cache.device).unsqueeze(0)
                sight = _Sight(positions_1R, num_blocks, block, cache.bias_T.dtype)
                groups.append((tokens, num_blocks, sight))
            self._groups.append(groups)
        cache.mark_written(self._slots_P)

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """See `Attention`."""
        cache = self._cache
        cache.write(layer, self._slots_P, kv_PKH)
        num_heads, num_kv_heads = query_PNH.shape[1], cache.num_kv_heads
        outputs = []
        for slots_S, groups in zip(self._slots, self._groups, strict=True):
            kv = cache.layers[layer].index_select(1, slots_S)
            kv = kv.view(2 * num_kv_heads, 1, -1, cache.page_size, kv.shape[-1])
            for tokens, num_blocks, sight in groups:
                query = _by_kv_head(query_PNH[tokens], 1, num_kv_heads)
                out = sight.attend(query, kv[:, :, :num_blocks], num_heads // num_kv_heads)
                outputs.append(_by_token(out, tokens.stop - tokens.start))
        return torch.cat(outputs)


def invariant_paged(cache: KvCache) -> PagedAttention:
    """Return a `PagedAttention` whose blocks are the pages; `SequenceKv.num_copied` aligns responses to pages."""
    return PagedAttention(cache, attend=attend_block, merge=merge_blocks)


def invariant_lanes(
    view: LaneView, slots_P: Tensor, positions_P: Tensor, bias_BRS: Tensor
) -> _ChainAttention | _TreeAttention:
    """See `tree_attention.lane_attention`. Compares slots with positions on the host, which is free on a CPU."""
    positions_BR = positions_P.view(view.num_rows, -1)
    places_BR = slots_P.view(view.num_rows, -1) - view.starts_B.unsqueeze(1)
    if torch.equal(places_BR, positions_BR):
        return _ChainAttention(view, slots_P, positions_BR)
    return _TreeAttention(view, slots_P, places_BR[:, 0], positions_BR, bias_BRS == 0)


class _ChainAttention:
    """Causal attention of queries whose slots are already those of the committed sequence: a chain."""

    def __init__(self, view: LaneView, slots_P: Tensor, positions_BR: Tensor) -> None:
        self._view = view
        self._slots_P = slots_P
        block, dtype = view.cache.page_size, view.cache.bias_T.dtype
        self._num_blocks = int(positions_BR.max()) // block + 1
        self._sight = _Sight(positions_BR, self._num_blocks, block, dtype)

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """See `Attention`."""
        view, cache = self._view, self._view.cache
        cache.write(layer, self._slots_P, kv_PKH)
        query = _by_kv_head(query_PNH, view.num_rows, cache.num_kv_heads)
        kv = view.blocks(layer, self._num_blocks)
        out = self._sight.attend(query, kv, query_PNH.shape[1] // cache.num_kv_heads)
        return _by_token(out, query_PNH.shape[0])


class _TreeAttention:
    """Attention of tree nodes.

    A query reads the blocks before the root's block in place. From the root's block on, it reads a copy that holds its own
    path in position order, as the lane will once the path is committed.
    """

    def __init__(
        self,
        view: LaneView,
        slots_P: Tensor,
        roots_B: Tensor,
        positions_BR: Tensor,
        is_seen_BRS: Tensor,
    ) -> None:
        """`roots_B` are positions. The visible slots of a query must be in position order: parents before children."""
        self._view = view
        self._slots_P = slots_P
        block = view.cache.page_size
        first_B1 = (roots_B // block).unsqueeze(1)  # the block of the root
        last_BR = positions_BR // block
        self._num_before = int(first_B1.max())
        self._num_blocks = num_blocks = int(last_BR.max()) + 1
        blocks_M = torch.arange(num_blocks, device=roots_B.device)
        is_hidden_BRM = blocks_M > last_BR.unsqueeze(2)
        is_copied_BRM = (blocks_M >= first_B1).unsqueeze(1) & ~is_hidden_BRM
        self._is_hidden_PM = is_hidden_BRM.flatten(0, 1)[..., None, None]
        # X: all pairs of a query and a block copied for it, as indices into the parts of all queries.
        self._parts_X = is_copied_BRM.view(-1).nonzero().squeeze(1)
        self._queries_X = self._parts_X // num_blocks
        self._find_paths(positions_BR, is_seen_BRS)
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def _find_paths(self, positions_BR: Tensor, is_seen_BRS: Tensor) -> None:
        """Find the slots of the copied blocks' keys, and mask the keys that their queries do not see."""
        view, block, length = self._view, self._view.cache.page_size, is_seen_BRS.shape[2]
        num_queries = positions_BR.shape[1]
        ranks_PS = (is_seen_BRS.cumsum(dim=2) - 1).masked_fill_(~is_seen_BRS, length).flatten(0, 1)
        places_PS = torch.arange(length, device=ranks_PS.device).expand_as(ranks_PS)
        place_of = places_PS.new_zeros(ranks_PS.shape[0], length + 1)
        place_of.scatter_(1, ranks_PS, places_PS)
        starts_X1 = (self._parts_X % self._num_blocks * block).unsqueeze(1)
        positions_XS = starts_X1 + torch.arange(block, device=ranks_PS.device)
        queries_X1 = self._queries_X.unsqueeze(1)
        places_XS = place_of[queries_X1, positions_XS.clamp(max=length - 1)]
        self._copied_slots = (places_XS + view.starts_B[queries_X1 // num_queries]).view(-1)
        is_masked_XS = positions_XS > positions_BR.view(-1)[queries_X1]
        bias = torch.zeros(
            is_masked_XS.shape, dtype=view.cache.bias_T.dtype, device=places_XS.device
        )
        self._bias = bias.masked_fill_(is_masked_XS, -torch.inf)[:, None, None]

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """See `Attention`."""
        view, cache, num_before = self._view, self._view.cache, self._num_before
        cache.write(layer, self._slots_P, kv_PKH)
        num_tokens, num_heads, head_dim = query_PNH.shape
        num_rows, num_kv_heads = view.num_rows, cache.num_kv_heads
        repeat = num_heads // num_kv_heads
        copied, out_PM, lse_PM = self._ready_buffers(layer, query_PNH)
        if num_before:
            num_queries = num_tokens // num_rows
            bias = self._bias.new_zeros(()).expand(
                num_rows, num_before, num_queries * repeat, cache.page_size
            )
            query = _by_kv_head(query_PNH, num_rows, num_kv_heads)
            parts = attend_rows(query, view.blocks(layer, num_before), bias)
            for target, part in zip((out_PM, lse_PM), parts, strict=True):
                split = part.unflatten(3, (num_queries, repeat)).movedim(3, 1)
                target.unflatten(0, (num_rows, -1))[:, :, :num_before].copy_(split)
        torch.index_select(cache.layers[layer], 1, self._copied_slots, out=copied)
        kv = copied.unflatten(1, (-1, cache.page_size)).transpose(0, 1)
        query = query_PNH.view(num_tokens, num_kv_heads, repeat, head_dim)
        parts = attend_block(
            query.index_select(0, self._queries_X),
            kv[:, :num_kv_heads],
            kv[:, num_kv_heads:],
            self._bias,
        )
        for target, part in zip((out_PM, lse_PM), parts, strict=True):
            target.flatten(0, 1).index_copy_(0, self._parts_X, part)
        lse_PM.masked_fill_(self._is_hidden_PM, -torch.inf)
        return merge_blocks(out_PM, lse_PM).reshape(num_tokens, num_heads * head_dim)

    def _ready_buffers(self, layer: int, query_PNH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return buffers for the copied keys and values [2K, X * S, H], and for out and lse of all parts.

        All layers reuse them: allocating per layer would cost more than the computation.
        """
        if self._buffers is None:
            num_tokens, num_heads, head_dim = query_PNH.shape
            kv = self._view.cache.layers[layer]
            num_kv_heads = self._view.cache.num_kv_heads
            parts = (num_tokens, self._num_blocks, num_kv_heads, num_heads // num_kv_heads)
            wide = torch.float64 if kv.dtype == torch.float64 else torch.float32
            self._buffers = (
                kv.new_empty(kv.shape[0], self._copied_slots.numel(), head_dim),
                kv.new_zeros(*parts, head_dim),  # finite where nothing is written
                kv.new_zeros(parts, dtype=wide),
            )
        return self._buffers


def check_attention(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise RuntimeError if a query's result on this machine depends on the other queries or blocks of the call."""
    block, repeat = 64, config.num_heads // config.num_kv_heads
    shape = (3, config.num_kv_heads, 2 * block, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    # Values that cancel: see `invariant.cancelling`.
    key = torch.cat((key[:, :, : block // 2], key[:, :, : block // 2].flip(2)), dim=2)
    value = torch.cat((value[:, :, : block // 2], -value[:, :, : block // 2].flip(2)), dim=2)
    bias = torch.zeros(3, 1, 1, block, dtype=dtype)
    bias[1, ..., block // 3 :] = -torch.inf
    expected = [
        attend_block(query[:, :, i : i + _QUERY_ROWS].contiguous(), key, value, bias)
        for i in range(0, query.shape[2], _QUERY_ROWS)
    ]
    outs, lses = (torch.cat(parts, dim=2) for parts in zip(*expected, strict=True))
    for num_queries in {repeat, *(size * repeat for size in (2, 5, 8, 17, 32))}:
        for rows in (slice(0, 3), slice(1, 2)):
            size = min(num_queries, query.shape[2])
            out, lse = attend_block(
                query[rows, :, :size].contiguous(), key[rows], value[rows], bias[rows]
            )
            if not torch.equal(out, outs[rows, :, :size]) or not torch.equal(
                lse, lses[rows, :, :size]
            ):
                raise RuntimeError(
                    f"rollout.batch_invariant=True: on this machine {dtype} attention of {size} queries over {block}"
                    f" keys is not that of {_QUERY_ROWS} queries at a time"
                )
