"""Arithmetic of the CPU path: what lies between two matrices of a layer is compiled loops.

The bits of a row do not depend on the rows and queries beside it. So `invariant_arithmetic.py` uses
these operations for `rollout.batch_invariant` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models import cpu_kernels
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.attention.lanes import LaneView, Visible
from tlt_megatron.models.attention.tables import TableRead, table_lanes
from tlt_megatron.models.cpu_kernels import KINDS
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.layers import AddingNorm, RmsNorm

_QUERIES = 64  # queries of a row at once: bounds the memory of their scores


class CompiledTables:
    """See `tables.AttendTables`. `first_layer` is the cache's for layer 0."""

    def __init__(
        self,
        cache: KvCache,
        slots_P: Tensor,
        reads: Sequence[TableRead],
        *,
        first_layer: int = 0,
    ) -> None:
        self._cache, self._slots, self._first_layer = cache, slots_P.numpy(), first_layer
        # Of consecutive tokens: places of a multiple of 4 keys, and how many each query sees.
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        for table_XS, positions_XR in reads:
            padding = -table_XS.shape[1] % 4
            places_XS = F.pad(table_XS, (0, padding)) if padding else table_XS.contiguous()
            if positions_XR.shape[1] <= _QUERIES:
                self._parts.append((places_XS.numpy(), positions_XR.numpy() + 1))
                continue
            for places, positions in zip(places_XS.split(1), positions_XR.split(1), strict=True):
                parts = positions.split(_QUERIES, dim=1)
                self._parts += [(places.numpy(), part.numpy() + 1) for part in parts]

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        kv_KTH, kind = self._cache.layers[layer + self._first_layer], KINDS[query_PNH.dtype]
        (num_kv_heads, num_slots, size), num_heads = kv_KTH.shape, query_PNH.shape[1]
        # The loops take sizes on trust.
        assert query_PNH.dtype == kv_PKH.dtype == kv_KTH.dtype
        assert kv_PKH.shape[1:] == (num_kv_heads, size)
        assert query_PNH.shape[1:] == (num_kv_heads // 2 * self._cache.num_heads_per_kv, size)
        target = self._slots, kv_KTH.data_ptr(), num_slots, num_kv_heads, size, kind
        cpu_kernels.store(kv_PKH.data_ptr(), kv_PKH.stride(0), *target)
        shape = num_kv_heads // 2, self._cache.num_heads_per_kv, size, num_slots
        out_PN = query_PNH.new_empty(len(query_PNH), num_heads * size)
        start = 0
        for places_XS, lengths_XQ in self._parts:
            query, out = query_PNH[start:], out_PN[start:]
            source = query.data_ptr(), query.stride(0), kv_KTH.data_ptr()
            cpu_kernels.attend(*source, places_XS, lengths_XQ, out.data_ptr(), shape, kind)
            start += lengths_XQ.size
        return out_PN

    def cache(self) -> tuple[int, int, int]:
        """Return the address of the first layer's KV, the bytes of a layer, and the slots."""
        kv_LKTH, first = self._cache.kv_LKTH, self._cache.layers[self._first_layer]
        return first.data_ptr(), first.nbytes, kv_LKTH.shape[2]

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the slots of consecutive tokens, the places of their rows' keys, and how many each
        query sees.
        """
        start = 0
        for places_XS, lengths_XQ in self._parts:
            end = start + lengths_XQ.size
            yield self._slots[start:end], places_XS, lengths_XQ
            start = end


def compiled_lanes(
    view: LaneView, slots_P: Tensor, visible: Visible, *, first_layer: int = 0
) -> Attention:
    """See `lanes.LaneTreeAttention`."""
    attend = partial(CompiledTables, first_layer=first_layer)
    if not visible.is_chain:
        return table_lanes(attend, view, slots_P, visible)
    positions_BR = slots_P.view(view.num_rows, -1) - view.starts_B.unsqueeze(1)
    # Rows that pad a pass see anything.
    read = TableRead(view.slots(visible.length), positions_BR.clamp_(0, visible.length - 1))
    return attend(view.cache, slots_P, [read])


class CompiledNorm(AddingNorm):
    """`RmsNorm` as one loop, with the sum before it."""

    def __init__(self, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(eps, dtype, device)
        self.dtype = dtype
        self.value = self.eps.numpy()[()]

    def add(self, x: Tensor, weight: Tensor | None, addend_PD: Tensor | None = None) -> Tensor:
        x = x if x.dim() == 2 else x.contiguous()
        tensors = [tensor for tensor in (x, weight, addend_PD) if tensor is not None]
        assert all(each.stride(-1) == 1 and each.dtype == x.dtype for each in tensors)
        size, out = x.shape[-1], torch.empty_like(x, memory_format=torch.contiguous_format)
        addend = (0, 0) if addend_PD is None else (addend_PD.data_ptr(), addend_PD.stride(0))
        weight_at = 0 if weight is None else weight.data_ptr()
        result = out.data_ptr(), x.numel() // size, size, KINDS[x.dtype]
        cpu_kernels.normalize(x.data_ptr(), x.stride(-2), *addend, weight_at, self.value, *result)
        return out


def rotate(
    heads_PAH: Tensor,
    num_rotated: int,
    angles: tuple[Tensor, Tensor],
    norm: RmsNorm,
    weight: Tensor | None,
) -> Tensor:
    """See `arithmetic.rotate_in_place`."""
    assert isinstance(norm, CompiledNorm)
    assert heads_PAH.stride()[1:] == (heads_PAH.shape[2], 1)
    cos_P1H, sin_P1H = angles
    shape = heads_PAH.shape[0], num_rotated, heads_PAH.shape[2], cos_P1H.shape[2] // 2
    weight_at = 0 if weight is None else weight.data_ptr()
    table = cos_P1H.data_ptr(), sin_P1H.data_ptr(), cos_P1H.stride(0), shape
    kind = KINDS[heads_PAH.dtype]
    cpu_kernels.rotate(
        heads_PAH.data_ptr(), heads_PAH.stride(0), weight_at, norm.value, *table, kind
    )
    return heads_PAH


def gate_silu(gate_PF: Tensor, up_PF: Tensor) -> Tensor:
    """See `arithmetic.gate_silu`."""
    num_rows, size = gate_PF.shape
    out, kind = gate_PF.new_empty(num_rows, size), KINDS[gate_PF.dtype]
    inputs = gate_PF.data_ptr(), gate_PF.stride(0), up_PF.data_ptr(), up_PF.stride(0)
    cpu_kernels.gate(*inputs, out.data_ptr(), num_rows, size, kind)
    return out
