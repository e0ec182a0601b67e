"""Batch-invariant attention on CUDA: each token reads its keys in position order, by a table of slots.

Nothing here waits for the GPU, and `ordered_lanes` can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.attention.tables import TableRead
from tlt_megatron.models.kv_cache import KvCache


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
        # Imported when needed: CPU builds of torch come without triton.
        from tlt_megatron.models.attention.ordered_kernel import attend_ordered

        self._cache.write(layer, self._slots_P, kv_PKH)
        kv_KTH = self._cache.layers[layer]
        return attend_ordered(query_PNH, kv_KTH, self._table_XS, self._rows_P, self._lengths_P)


def ordered_lanes(view: LaneView, slots_P: Tensor, bias_BRS: Tensor) -> OrderedAttention:
    """See `lanes.LaneTreeAttention`. A query's visible slots are in order, parents first."""
    columns_S = torch.arange(bias_BRS.shape[2], device=view.cache.device)
    slots_BRS = (view.starts_B[:, None, None] + columns_S).expand_as(bias_BRS)
    seen_BRS = bias_BRS == 0
    # One more column takes all slots that are not seen.
    columns_BRS = torch.where(seen_BRS, seen_BRS.cumsum(2) - 1, len(columns_S))
    table_BRS = slots_BRS.new_zeros(*bias_BRS.shape[:2], len(columns_S) + 1)
    table_PS = table_BRS.scatter_(2, columns_BRS, slots_BRS).flatten(0, 1)[:, :-1]
    positions_P1 = seen_BRS.sum(2).view(-1, 1) - 1
    return OrderedAttention(view.cache, slots_P, [TableRead(table_PS, positions_P1)])
