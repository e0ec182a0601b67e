"""Batch-invariant attention on CUDA: each token reads its keys in position order, by a table of slots.

So prefill, decoding over pages or lanes, and verifying a chain or a tree give the same bits. Nothing
here waits for the GPU, and `ordered_lanes` can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.attention.paged import PagedAttention, PrefillSegment
from tlt_megatron.models.kv_cache import KvCache, SequenceKv


class OrderedAttention:
    """Attention of P tokens. Token p sees the first `lengths_P[p]` slots of row `rows_P[p]`."""

    def __init__(
        self, cache: KvCache, slots_P: Tensor, table_XS: Tensor, rows_P: Tensor, lengths_P: Tensor
    ) -> None:
        """`slots_P` are the slots that the tokens' own keys and values go to."""
        self._cache = cache
        self._slots_P = slots_P
        self._read = table_XS, rows_P, lengths_P

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        # Imported when needed: CPU builds of torch come without triton.
        from tlt_megatron.models.attention.ordered_kernel import attend_ordered

        self._cache.write(layer, self._slots_P, kv_PKH)
        return attend_ordered(query_PNH, self._cache.layers[layer], *self._read)


def _attend_seen(
    cache: KvCache, slots_P: Tensor, slots_PS: Tensor, is_seen_PS: Tensor
) -> OrderedAttention:
    """Return the attention of tokens that see the marked of `slots_PS`, in this order."""
    num_tokens, num_slots = slots_PS.shape
    places_PS = torch.where(is_seen_PS, is_seen_PS.cumsum(1) - 1, num_slots)
    # One more column takes all slots that are not seen.
    table = slots_PS.new_zeros(num_tokens, num_slots + 1).scatter_(1, places_PS, slots_PS)
    rows_P = torch.arange(num_tokens, device=cache.device)
    return OrderedAttention(cache, slots_P, table[:, :-1], rows_P, is_seen_PS.sum(1))


def ordered_lanes(view: LaneView, slots_P: Tensor, bias_BRS: Tensor) -> OrderedAttention:
    """See `lanes.LaneTreeAttention`. A query's visible slots are in order, parents first."""
    columns_S = torch.arange(bias_BRS.shape[2], device=view.cache.device)
    slots_BRS = (view.starts_B[:, None, None] + columns_S).expand_as(bias_BRS)
    seen_BRS = bias_BRS == 0
    return _attend_seen(view.cache, slots_P, slots_BRS.flatten(0, 1), seen_BRS.flatten(0, 1))


def ordered_prefill(cache: KvCache, segments: Sequence[PrefillSegment]) -> OrderedAttention:
    """See `paged.PrefillAttention`."""
    table_XS = pad_sequence([each.context_slots_S for each in segments], batch_first=True)
    rows, lengths = [], []
    for number, segment in enumerate(segments):
        num_new, num_all = segment.new_slots_C.numel(), segment.context_slots_S.numel()
        rows.append(torch.full((num_new,), number, device=cache.device))
        lengths.append(torch.arange(num_all - num_new + 1, num_all + 1, device=cache.device))
    slots_P = torch.cat([segment.new_slots_C for segment in segments])
    cache.mark_written(slots_P)
    return OrderedAttention(cache, slots_P, table_XS, torch.cat(rows), torch.cat(lengths))


class OrderedPages(PagedAttention):
    """See `paged.PagedAttention`."""

    def rebuild(self, sequences: Sequence[SequenceKv]) -> None:
        """Plan for these sequences, in batch order."""
        cache = self._cache
        pages = [[*(each.prompt or ()), *each.pages] for each in sequences]
        longest = max(map(len, pages))
        padded = [each + [-1] * (longest - len(each)) for each in pages]
        pages_BM1 = torch.tensor(padded, device=cache.device).unsqueeze(2)
        columns_S = torch.arange(cache.page_size, device=cache.device)
        self._slots_BS = (pages_BM1.clamp(min=0) * cache.page_size + columns_S).flatten(1)
        self._is_page_BS = (pages_BM1 >= 0).expand(-1, -1, cache.page_size).flatten(1)

    def begin_step(self, slots_B: Tensor) -> None:
        """Set the slots that this pass writes, one per sequence."""
        self._cache.mark_written(slots_B)
        is_seen_BS = (self._cache.bias_T[self._slots_BS] == 0) & self._is_page_BS
        self._ordered = _attend_seen(self._cache, slots_B, self._slots_BS, is_seen_BS)

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        return self._ordered.attend(layer, query_PNH, kv_PKH)
