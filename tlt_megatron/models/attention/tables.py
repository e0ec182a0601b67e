"""Attention whose keys are read in position order, by tables of slots: for compiled loops on a CPU,
and for batch-invariant arithmetic.

Column p of a table row holds the slot of position p, wherever the sequence lies. So prefill,
decoding over pages or lanes, and verifying a chain or a tree read the same keys in the same order.
Two classes attend over tables: `CompiledTables` on a CPU and `OrderedAttention` on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tlt_megatron.models.attention import Attention
from tlt_megatron.models.attention.lanes import LaneView, Visible
from tlt_megatron.models.attention.paged import PrefillSegment
from tlt_megatron.models.kv_cache import KvCache, SequenceKv


class TableRead(NamedTuple):
    """R queries of each of X table rows. The query at position p sees columns 0..p of its row."""

    table_XS: Tensor
    positions_XR: Tensor


# The cache, the slots that packed tokens are written to, and the reads of these tokens in order.
AttendTables = Callable[[KvCache, Tensor, Sequence[TableRead]], Attention]


def table_prefill(
    attend: AttendTables, cache: KvCache, segments: Sequence[PrefillSegment]
) -> Attention:
    """See `paged.PrefillAttention`."""
    slots_P = torch.cat([segment.new_slots_C for segment in segments])
    reads = []
    for segment in segments:
        num_new, num_all = segment.new_slots_C.numel(), segment.context_slots_S.numel()
        positions_C = torch.arange(num_all - num_new, num_all, device=cache.device)
        reads.append(TableRead(segment.context_slots_S[None], positions_C[None]))
    return attend(cache, slots_P, reads)


class TablePages:
    """See `paged.PagedAttention`."""

    def __init__(self, attend: AttendTables, cache: KvCache) -> None:
        self._attend = attend
        self._cache = cache

    def rebuild(self, sequences: Sequence[SequenceKv]) -> None:
        cache = self._cache
        pages = []
        for each in sequences:
            assert each.prompt is not None
            pages.append(torch.tensor([*each.prompt, *each.pages]))
        pages_BM = pad_sequence(pages, batch_first=True)
        num_prompt_B1 = torch.tensor([[each.num_prompt] for each in sequences])
        columns_S = torch.arange(pages_BM.numel() // len(pages) * cache.page_size)
        # A response begins with a page of its own, after the rest of the prompt's last one.
        gaps_BS = torch.where(columns_S < num_prompt_B1, 0, -num_prompt_B1 % cache.page_size)
        places_BS = (columns_S + gaps_BS).clamp_(max=len(columns_S) - 1)
        table_BS = pages_BM.gather(1, places_BS // cache.page_size) * cache.page_size
        self._table_BS = table_BS.add_(places_BS % cache.page_size).to(cache.device)

    def pass_of(self, slots_B: Tensor, positions_B: Tensor) -> Attention:
        read = TableRead(self._table_BS, positions_B.unsqueeze(1))
        return self._attend(self._cache, slots_B, [read])


def table_lanes(
    attend: AttendTables, view: LaneView, slots_P: Tensor, visible: Visible
) -> Attention:
    """See `lanes.LaneTreeAttention`. Each query has a table of the slots that it sees: they are in
    order, parents first.

    Nothing here waits for a GPU, so it can be captured in a graph.
    """
    bias_BRS = visible.make_bias()
    columns_S = torch.arange(visible.length, device=view.cache.device)
    slots_BRS = (view.starts_B[:, None, None] + columns_S).expand_as(bias_BRS)
    seen_BRS = bias_BRS == 0
    # One more column takes all slots that are not seen.
    columns_BRS = torch.where(seen_BRS, seen_BRS.cumsum(2) - 1, len(columns_S))
    table_BRS = slots_BRS.new_zeros(*bias_BRS.shape[:2], len(columns_S) + 1)
    table_PS = table_BRS.scatter_(2, columns_BRS, slots_BRS).flatten(0, 1)[:, :-1]
    positions_P1 = seen_BRS.sum(2).view(-1, 1) - 1
    return attend(view.cache, slots_P, [TableRead(table_PS, positions_P1)])
