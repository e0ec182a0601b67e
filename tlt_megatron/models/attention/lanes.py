"""Attention over lanes: contiguous ranges of KV slots, one per sequence. One object per pass. Lanes
are all of one length (`LaneView`), or start anywhere (`LooseView`).

New keys go to slots after the committed ones, and a bias says which of them each query sees. So a
chain, a tree and a plain extension each need one kernel call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_megatron.models.attention.kernels import attend_grouped, bias_for_queries, is_fused
from tlt_megatron.models.kv_cache import KvCache

_LANE_SLICE = 32  # positions; lanes are read up to the longest sequence, rounded up to a multiple


class LaneView:
    """B sequences in lanes of `lane` slots: row b starts at slot (first_row + b) * lane.

    A view can be reused while the same rows run.
    """

    def __init__(self, cache: KvCache, *, num_rows: int, lane: int, first_row: int = 0) -> None:
        self.cache = cache
        self.num_rows = num_rows
        self.lane = lane
        self._first_row = first_row
        self._slots = slice(first_row * lane, (first_row + num_rows) * lane)
        self.starts_B = torch.arange(first_row, first_row + num_rows, device=cache.device) * lane
        self._bias_B1T = cache.bias_T[self._slots].view(num_rows, 1, lane)
        self._kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._slots_BS: dict[int, Tensor] = {}

    def slots(self, length: int) -> Tensor:
        """Return the slots of the first `length` positions, [B, S]. Beyond a lane they are any."""
        found = self._slots_BS.get(length)
        if found is None:
            slots_BS = self.starts_B.unsqueeze(1) + torch.arange(length, device=self.cache.device)
            found = slots_BS.clamp_(max=self.cache.bias_T.shape[0] - 1)
            self._slots_BS = {length: found}
        return found

    def part(self, start: int, end: int) -> LaneView:
        """Return a view of rows start..end-1."""
        first_row = self._first_row + start
        return LaneView(self.cache, num_rows=end - start, lane=self.lane, first_row=first_row)

    def read_length(self, longest: int) -> int:
        """Round `longest` up to few distinct lengths, so that views are reused."""
        return min(-(-longest // _LANE_SLICE) * _LANE_SLICE, self.lane)

    def kv(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [B, K, S, H], of the first `length` positions."""
        found = self._kv.get((layer, length))
        if found is None:
            kv_KTH = self.cache.layers[layer][:, self._slots]
            kv_BKTH = kv_KTH.unflatten(1, (self.num_rows, self.lane)).transpose(0, 1)
            keys, values = kv_BKTH[:, :, :length].chunk(2, dim=1)
            found = self._kv[layer, length] = keys, values
        return found

    def committed_bias(self, length: int) -> Tensor:
        """Return [B, 1, S], a view: 0 where a position is committed, -inf elsewhere."""
        return self._bias_B1T[..., :length]

    def attend(self, layer: int, query_BRNH: Tensor, bias: Tensor) -> Tensor:
        """Return `kernels.attend_grouped` over the first S positions of each lane."""
        keys, values = self.kv(layer, bias.shape[3])
        return attend_grouped(query_BRNH, keys, values, bias)


class LooseView(LaneView):
    """B sequences in lanes that start at any slot, each as long as its sequence needs.

    The starts and the numbers of committed positions [B] are tensors, so a captured graph reads the
    lanes of its rows wherever they are. Positions beyond a lane are those of other lanes, and
    hidden.
    """

    def __init__(self, cache: KvCache, starts_B: Tensor, positions_B: Tensor) -> None:
        self.cache = cache
        self.num_rows = starts_B.shape[0]
        self.starts_B = starts_B
        self._positions_B = positions_B
        self.lane = cache.bias_T.shape[0]
        self._slots_BS: dict[int, Tensor] = {}

    def part(self, start: int, end: int) -> LooseView:
        """See `LaneView`."""
        return LooseView(self.cache, self.starts_B[start:end], self._positions_B[start:end])

    def committed_bias(self, length: int) -> Tensor:
        """See `LaneView`. Not a view."""
        return _causal_bias(self, self._positions_B.unsqueeze(1) - 1, length)

    def attend(self, layer: int, query_BRNH: Tensor, bias: Tensor) -> Tensor:
        """See `LaneView`. Without a fused kernel, keys and values are copied."""
        kv_KTH, length = self.cache.layers[layer], bias.shape[3]
        if is_fused(kv_KTH):
            kv_BKTH = kv_KTH[:, :length].expand(self.num_rows, -1, -1, -1)
            keys, values = kv_BKTH.chunk(2, dim=1)
            return attend_grouped(query_BRNH, keys, values, bias, self.starts_B)
        kv_KPH = kv_KTH.index_select(1, self.slots(length).view(-1))
        kv_BKSH = kv_KPH.unflatten(1, (-1, length)).transpose(0, 1)
        keys, values = kv_BKSH.chunk(2, dim=1)
        return attend_grouped(query_BRNH, keys, values, bias)


class Visible(NamedTuple):
    """Which of the first `length` positions of its lane each query sees."""

    length: int
    make_bias: Callable[[], Tensor]  # returns [B, R, S]: 0 where a query sees a key, else -inf
    is_chain: bool = False  # whether a query sees all up to its own slot


class LaneTreeAttention:
    """Attention of R queries per row, packed row by row: [B*R]."""

    def __init__(
        self,
        view: LaneView,
        slots_P: Tensor,
        visible: Visible,
        *,
        first_layer: int = 0,
    ) -> None:
        """`first_layer` is the cache's for layer 0."""
        self._view = view
        self._slots_P = slots_P
        self._first_layer = first_layer
        self._bias = bias_for_queries(visible.make_bias(), view.cache.num_heads_per_kv)

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        view, layer = self._view, layer + self._first_layer
        view.cache.write(layer, self._slots_P, kv_PKH)
        query_BRNH = query_PNH.view(view.num_rows, -1, *query_PNH.shape[1:])
        return view.attend(layer, query_BRNH, self._bias)


def causal(view: LaneView, positions_BM: Tensor, length: int) -> Visible:
    """A query at position t sees positions 0..t of its lane."""
    return Visible(length, lambda: _causal_bias(view, positions_BM, length), is_chain=True)


def _causal_bias(view: LaneView, positions_BM: Tensor, length: int) -> Tensor:
    device = view.cache.device
    visible_BMS = torch.arange(length, device=device) <= positions_BM.unsqueeze(2)
    zeros = torch.zeros((), dtype=view.cache.bias_T.dtype, device=device)
    return torch.where(visible_BMS, zeros, -torch.inf)


def drafted(
    view: LaneView,
    base_positions_B: Tensor,
    make_visible: Callable[[], Tensor],
    length: int,
    *,
    is_chain: bool = False,
) -> Visible:
    """A query sees committed positions, and the marked of X from its base. `make_visible` returns
    the marks, [B, R, X].
    """

    def make_bias() -> Tensor:
        visible_BRX = make_visible()
        num_queries, num_drafted = visible_BRX.shape[1:]
        bias = view.committed_bias(length).expand(-1, num_queries, -1).contiguous()
        columns_BX = base_positions_B.unsqueeze(1) + torch.arange(
            num_drafted, device=base_positions_B.device
        )
        shown = torch.where(visible_BRX, 0.0, -torch.inf).to(bias.dtype)
        columns = columns_BX.unsqueeze(1).expand(-1, num_queries, -1)
        return bias.scatter_(2, columns, shown)

    return Visible(length, make_bias, is_chain)
