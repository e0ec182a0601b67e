"""Batch-invariant attention: a query's bits do not depend on its pass.

Block m of a sequence is the page_size positions from m * page_size on, in any slots. For each
block, the kernel runs over exactly these keys in this order, with hidden keys masked. The number of
query rows is a multiple of 4: then a row's place does not matter, which `check_attention` checks.
The blocks are added pairwise, as a binary tree over their numbers; a hidden block adds exact zeros.
So prefill, decoding over pages or lanes, and verifying a chain or a tree give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention.kernels import attend_with_lse
from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.attention.paged import PagedAttention, PrefillSegment
from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.kv_cache import KvCache

_QUERY_ROWS = 4  # with fewer rows the kernel multiplies in another way
_PREFILL_QUERIES = 64  # queries at once: bounds the memory of their parts


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


def attend_rows(query_BKRH: Tensor, kv_KBMSH: Tensor, bias_BMRS: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over each block of each row: out [B, M, K, R, H] and lse [B, M, K, R].

    `kv_KBMSH` has 2K heads. The kernel allows only two batch dims with arbitrary strides, so with
    more than one row it runs once per block or once per kv head, whichever are fewer.
    """
    num_rows, num_kv_heads = query_BKRH.shape[:2]
    num_blocks = kv_KBMSH.shape[2]
    if num_rows == 1:
        key, value = kv_KBMSH[:, 0].transpose(0, 1).chunk(2, dim=1)
        query = query_BKRH.expand(num_blocks, -1, -1, -1)
        out, lse = attend_block(query, key, value, bias_BMRS[0].unsqueeze(1))
        return out.unsqueeze(0), lse.unsqueeze(0)
    if num_blocks <= num_kv_heads:
        dim = 1
        key, value = kv_KBMSH.transpose(0, 1).chunk(2, dim=1)
        parts = [
            attend_block(query_BKRH, key[:, :, m], value[:, :, m], bias_BMRS[:, m].unsqueeze(1))
            for m in range(num_blocks)
        ]
    else:
        dim = 2
        query = query_BKRH.unsqueeze(2).expand(-1, -1, num_blocks, -1, -1)
        key, value = kv_KBMSH.chunk(2)
        parts = [
            attend_block(query[:, head], key[head], value[head], bias_BMRS)
            for head in range(num_kv_heads)
        ]
    outs, lses = zip(*parts, strict=True)
    if len(outs) == 1:
        return outs[0].unsqueeze(dim), lses[0].unsqueeze(dim)
    return torch.stack(outs, dim=dim), torch.stack(lses, dim=dim)


class _Blocks:
    """Attention at `positions_BR` over the first M blocks of B sequences, for all layers."""

    def __init__(self, cache: KvCache, positions_BR: Tensor, num_blocks: int = 0) -> None:
        """`num_blocks` of 0 takes all blocks that a query sees."""
        self._num_rows, self._num_queries = positions_BR.shape
        self._num_kv_heads, repeat = cache.num_kv_heads, cache.num_heads_per_kv
        self.num_blocks = num_blocks or int(positions_BR.max()) // cache.page_size + 1
        self._padding = -self._num_queries * repeat % _QUERY_ROWS
        if self._num_queries > 1:  # otherwise one row of the bias serves all heads
            positions_BR = positions_BR.repeat_interleave(repeat, dim=1)
            positions_BR = F.pad(positions_BR, (0, self._padding))
        bias = block_bias(positions_BR, self.num_blocks, cache.page_size, cache.bias_T.dtype)
        self._bias_BMRS, is_hidden_BMR = bias
        self._is_hidden = is_hidden_BMR.unsqueeze(2) if is_hidden_BMR.any() else None

    def parts(self, query_PNH: Tensor, kv_KBMSH: Tensor) -> tuple[Tensor, Tensor]:
        """Return out [B, M, K, R, H] and lse of every block. R counts the queries of a kv head,
        padded to a multiple of _QUERY_ROWS.
        """
        query = query_PNH.view(
            self._num_rows, self._num_queries, self._num_kv_heads, -1, query_PNH.shape[2]
        )
        query_BKRH = query.transpose(1, 2).flatten(2, 3)
        if self._padding:
            query_BKRH = F.pad(query_BKRH, (0, 0, 0, self._padding))
        out, lse = attend_rows(query_BKRH, kv_KBMSH, self._bias_BMRS)
        return out, lse if self._is_hidden is None else lse.masked_fill_(
            self._is_hidden, -torch.inf
        )

    def attend(self, query_PNH: Tensor, kv_KBMSH: Tensor) -> Tensor:
        """Return [P, N*H]."""
        merged_BKRH = merge_blocks(*self.parts(query_PNH, kv_KBMSH))
        out = self.by_query(merged_BKRH, dim=2).transpose(1, 2)
        return out.reshape(query_PNH.shape[0], -1)

    def by_query(self, padded: Tensor, dim: int) -> Tensor:
        """Replace the padded R at `dim` by two dims: queries, and heads of each."""
        num_padded = padded.shape[dim]
        if self._padding:
            padded = padded.narrow(dim, 0, num_padded - self._padding)
        return padded.unflatten(dim, (self._num_queries, -1))


class InvariantPrefillAttention:
    """See `paged.PrefillAttention`."""

    def __init__(self, cache: KvCache, segments: Sequence[PrefillSegment]) -> None:
        self._cache = cache
        self._slots_P = torch.cat([segment.new_slots_C for segment in segments])
        self._slots: list[Tensor] = []  # of each segment's blocks, the last padded with any slot
        self._groups: list[list[_Blocks]] = []  # of each segment, at most _PREFILL_QUERIES each
        self._sizes: list[int] = []  # queries of all groups
        for segment in segments:
            num_new, num_all = segment.new_slots_C.numel(), segment.context_slots_S.numel()
            filler = segment.context_slots_S[:1].expand(-num_all % cache.page_size)
            self._slots.append(torch.cat((segment.context_slots_S, filler)))
            positions = torch.arange(num_all - num_new, num_all, device=cache.device)
            groups = positions.unsqueeze(0).split(_PREFILL_QUERIES, dim=1)
            self._groups.append([_Blocks(cache, positions_1R) for positions_1R in groups])
            self._sizes += [positions_1R.shape[1] for positions_1R in groups]
        cache.mark_written(self._slots_P)

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        cache = self._cache
        cache.write(layer, self._slots_P, kv_PKH)
        queries = iter(query_PNH.split(self._sizes))
        outputs = []
        for slots_S, groups in zip(self._slots, self._groups, strict=True):
            kv_KSH = cache.layers[layer].index_select(1, slots_S)
            kv_K1MSH = kv_KSH.unflatten(1, (1, -1, cache.page_size))
            outputs += [b.attend(next(queries), kv_K1MSH[:, :, : b.num_blocks]) for b in groups]
        return torch.cat(outputs)


def invariant_paged(cache: KvCache) -> PagedAttention:
    """Return a `PagedAttention` whose blocks are pages, to which `num_copied` aligns responses."""
    return PagedAttention(cache, attend=attend_block, merge=merge_blocks)


def invariant_lanes(
    view: LaneView, slots_P: Tensor, bias_BRS: Tensor
) -> _ChainAttention | _TreeAttention:
    """See `lanes.LaneTreeAttention`. Slots are compared with positions on the host."""
    is_seen_BRS = bias_BRS == 0
    positions_BR = is_seen_BRS.sum(dim=2) - 1
    places_BR = slots_P.view(view.num_rows, -1) - view.starts_B.unsqueeze(1)
    if torch.equal(places_BR, positions_BR):
        return _ChainAttention(view, slots_P, positions_BR)
    return _TreeAttention(view, slots_P, places_BR[:, :1], positions_BR, is_seen_BRS)


class _ChainAttention:
    """Attention of queries whose slots are already those of the committed sequence."""

    def __init__(self, view: LaneView, slots_P: Tensor, positions_BR: Tensor) -> None:
        self._view = view
        self._slots_P = slots_P
        self._blocks = _Blocks(view.cache, positions_BR)

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        self._view.cache.write(layer, self._slots_P, kv_PKH)
        kv_KBMSH = self._view.blocks(layer, self._blocks.num_blocks)
        return self._blocks.attend(query_PNH, kv_KBMSH)


class _TreeAttention:
    """Attention of tree nodes.

    A query reads the blocks before the root's block in place. From the root's block on, it reads a
    copy that holds its own path in position order, as the lane will once the path is committed. X
    counts all pairs of a query and a block copied for it, as indices into the parts of all queries.
    """

    def __init__(
        self,
        view: LaneView,
        slots_P: Tensor,
        roots_B1: Tensor,
        positions_BR: Tensor,
        is_seen_BRS: Tensor,
    ) -> None:
        """`roots_B1` are positions. A query's visible slots are in order, parents first."""
        self._view = view
        self._slots_P = slots_P
        cache, block, (num_rows, num_queries) = view.cache, view.cache.page_size, positions_BR.shape
        first_B1, last_BR = roots_B1 // block, positions_BR // block
        num_before, num_blocks = int(first_B1.max()), int(last_BR.max()) + 1
        self._before = _Blocks(cache, positions_BR, num_before) if num_before else None
        blocks_M = torch.arange(num_blocks, device=cache.device)
        is_hidden_BRM = blocks_M > last_BR.unsqueeze(2)
        is_copied_BRM = (blocks_M >= first_B1.unsqueeze(2)) & ~is_hidden_BRM
        self._is_hidden_PM = is_hidden_BRM.flatten(0, 1)[..., None, None]
        self._parts_X = is_copied_BRM.view(-1).nonzero().squeeze(1)
        self._queries_X = self._parts_X // num_blocks
        starts_X1 = (self._parts_X % num_blocks * block).unsqueeze(1)
        positions_XS = starts_X1 + torch.arange(block, device=cache.device)
        # The key at position p is the (p + 1)-th that the query sees.
        num_seen_XS = is_seen_BRS.cumsum(dim=2).flatten(0, 1)[self._queries_X]
        places_XS = torch.searchsorted(num_seen_XS, positions_XS + 1)
        places_XS.clamp_(max=is_seen_BRS.shape[2] - 1)
        lanes_X1 = view.starts_B[self._queries_X // num_queries].unsqueeze(1)
        self._copied_slots = (places_XS + lanes_X1).view(-1)
        is_masked_XS = positions_XS > positions_BR.view(-1)[self._queries_X].unsqueeze(1)
        bias_XS = torch.zeros(is_masked_XS.shape, dtype=cache.bias_T.dtype, device=cache.device)
        self._bias = bias_XS.masked_fill_(is_masked_XS, -torch.inf)[:, None, None]
        # All layers share these buffers: allocating them would cost more than the computation.
        kv = cache.layers[0]
        shape = num_rows * num_queries, num_blocks, cache.num_kv_heads, cache.num_heads_per_kv
        self._copied = kv.new_empty(kv.shape[0], self._copied_slots.numel(), kv.shape[2])
        self._out_PM = kv.new_zeros(*shape, kv.shape[2])  # finite where nothing is written
        self._lse_PM = kv.new_zeros(shape, dtype=wide_dtype(kv.dtype))

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        view, cache, all_parts = self._view, self._view.cache, (self._out_PM, self._lse_PM)
        cache.write(layer, self._slots_P, kv_PKH)
        if self._before is not None:
            num_before = self._before.num_blocks
            parts = self._before.parts(query_PNH, view.blocks(layer, num_before))
            for target, part in zip(all_parts, parts, strict=True):
                target = target.unflatten(0, (view.num_rows, -1))[:, :, :num_before]
                target.copy_(self._before.by_query(part, dim=3).movedim(3, 1))
        torch.index_select(cache.layers[layer], 1, self._copied_slots, out=self._copied)
        key, value = (
            self._copied.unflatten(1, (-1, cache.page_size)).transpose(0, 1).chunk(2, dim=1)
        )
        query = query_PNH.unflatten(1, (cache.num_kv_heads, -1)).index_select(0, self._queries_X)
        parts = attend_block(query, key, value, self._bias)
        for target, part in zip(all_parts, parts, strict=True):
            target.flatten(0, 1).index_copy_(0, self._parts_X, part)
        self._lse_PM.masked_fill_(self._is_hidden_PM, -torch.inf)
        return merge_blocks(*all_parts).flatten(1)


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
            same = zip(found, (x[rows, :, :num_queries] for x in expected), strict=True)
            if not all(torch.equal(x, y) for x, y in same):
                raise RuntimeError(
                    f"rollout.batch_invariant=True: on this machine {dtype} attention of"
                    f" {part.shape[2]} queries over {block} keys is not that of {_QUERY_ROWS}"
                    " queries at a time"
                )
