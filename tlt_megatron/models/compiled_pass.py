"""A product, and all dense layers of a pass, as one compiled loop each, on a CPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models import pass_kernels
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.compiled_layer import CompiledNorm, CompiledTables
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.cpu_kernels import KINDS
from tlt_megatron.models.draft_model import DraftConfig
from tlt_megatron.models.layers import DenseLayer, RmsNorm, RotaryTable
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.models.pass_kernels import PANEL


class CompiledMatrix(Matrix):
    """A matrix that multiplies by the loop, with any number of rows, each in the same order."""

    def refresh(self) -> None:
        """See `Matrix`. The packed copy is panels, [panels, steps, PANEL], padded with zeros."""
        num_out, num_in = self._weight.shape
        num_values = values_of(self._weight.dtype)
        pads, dense = (0, -num_in % num_values, 0, -num_out % PANEL), self._weight
        dense = (F.pad(dense, pads) if any(pads) else dense).contiguous()
        reads = dense.view(torch.int32) if num_values > 1 else dense
        panels = reads.unflatten(0, (-1, PANEL)).transpose(1, 2)
        if self._packed is None:
            self._packed = panels.contiguous()
        else:
            self._packed.copy_(panels)

    @property
    def num_out(self) -> int:
        return self._weight.shape[0]

    def addresses(self) -> tuple[int, int]:
        """Return those of the panels, which stay, and of the bias."""
        assert self._packed is not None
        return self._packed.data_ptr(), address_of(self._bias)

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        num_out, num_in = self._weight.shape
        assert x.shape[1] == num_in  # the loop takes sizes on trust
        assert x.dtype == self._weight.dtype
        num_values = values_of(x.dtype)
        x = F.pad(x, (0, num_in % num_values)) if num_in % num_values else x.contiguous()
        out, (panels, added) = x.new_empty(x.shape[0], num_out), self.addresses()
        row = 0
        if addend is not None and self._bias is None:
            added, row, addend = addend.data_ptr(), addend.stride(0), None
        sizes = x.shape[0], num_out, x.shape[1] // num_values, KINDS[x.dtype]
        pass_kernels.multiply(x.data_ptr(), panels, added, row, out.data_ptr(), *sizes)
        return out if addend is None else out.add_(addend)


class CompiledPass:
    """The layers of a policy or a drafter. Call `takes`, then the object."""

    def __init__(
        self,
        sizes: ModelConfig | DraftConfig,
        layers: Sequence[DenseLayer],
        norm: RmsNorm,
        rotary: RotaryTable,
        first_norm: Tensor | None = None,
    ) -> None:
        """`first_norm` normalizes the rows that no `heads_PA` are given for."""
        assert isinstance(norm, CompiledNorm)
        self._dtype, self.eps, s = norm.dtype, norm.value, sizes
        self._kept = layers, first_norm  # the loop has their addresses
        self._rotary, self._first_norm = rotary, address_of(first_norm)
        dtype, queries = norm.dtype, s.num_heads * s.head_dim
        self._num_fused = queries + 2 * s.num_kv_heads * s.head_dim
        num_angles = rotary.table_SH2.shape[1]
        self.room_size = num_angles + self._num_fused + queries + 3 * s.ffn_size + s.hidden_size
        num_values = values_of(dtype)
        self._is_whole = not any(n % num_values for n in (s.hidden_size, queries, s.ffn_size))
        heads = s.num_heads, s.num_kv_heads, s.head_dim
        self.shape = s.hidden_size, *heads, s.ffn_size, dtype.itemsize, num_values
        self.addresses = np.array([_addresses(layer) for layer in layers])
        self._no_taps = np.zeros(len(layers), np.int64)

    def takes(self, attention: Attention) -> bool:
        """Return whether the loop computes such a pass."""
        return self._is_whole and isinstance(attention, CompiledTables)

    def table(self) -> tuple[int, int]:
        """Return the address of the rotary table, and half of the values that turn."""
        table_SH2 = self._rotary.table_SH2
        assert table_SH2.dtype == self._dtype  # the loop takes it on trust
        return table_SH2.data_ptr(), table_SH2.shape[1] // 4

    def __call__(
        self,
        x_PD: Tensor,
        position_ids_P: Tensor,
        attention: Attention,
        *,
        heads_PA: Tensor | None = None,
        tap_layers: Collection[int] = (),
    ) -> list[Tensor]:
        """Run the layers. Return the norm of the result, then the residual stream after each of
        `tap_layers`, ascending.

        `x_PD` becomes the residual stream after the last layer. The `heads_PA` of a layer without
        qkv are changed.
        """
        assert isinstance(attention, CompiledTables)
        cache, row_bytes = attention.cache(), self.shape[0] * self._dtype.itemsize
        # The loop takes sizes on trust.
        num_kv_heads, head_dim = self.shape[2:4]
        assert cache[1] == 2 * num_kv_heads * cache[2] * head_dim * self._dtype.itemsize
        assert x_PD.dtype == self._dtype
        assert x_PD.is_contiguous()
        normed_PD = torch.empty_like(x_PD)
        taps = {layer: torch.empty_like(x_PD) for layer in sorted(tap_layers)}
        to_taps = self._no_taps.copy() if taps else self._no_taps
        table, half = self.table()
        positions_P, start = position_ids_P.numpy(), 0
        # A part sees no later one.
        for slots, places, lengths in attention.parts():
            part, at = slice(start, start + len(slots)), start * row_bytes
            rooms = x_PD.new_empty(len(slots) * self.room_size)
            heads, heads_row = 0, self._num_fused
            if heads_PA is not None:
                heads, heads_row = heads_PA[part].data_ptr(), heads_PA.stride(0)
            for layer, tap_PD in taps.items():
                to_taps[layer] = tap_PD.data_ptr() + at
            rows = x_PD.data_ptr() + at, normed_PD.data_ptr() + at, heads, rooms.data_ptr()
            weights = self._first_norm, self.addresses, to_taps
            keys, turns = (slots, places, lengths, *cache), (table, positions_P[part], half)
            sizes = heads_row, self.eps, self.shape, KINDS[x_PD.dtype]
            pass_kernels.run_layers(rows, *weights, keys, turns, *sizes)
            start = part.stop
        return [normed_PD, *taps.values()]


def values_of(dtype: torch.dtype) -> int:
    """Return the values that the loop reads at once."""
    return 2 if dtype == torch.bfloat16 else 1


def address_of(tensor: Tensor | None) -> int:
    """Return it. 0: there is no tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def _addresses(layer: DenseLayer) -> list[int]:
    matrices = [layer.qkv, layer.output, layer.gate_up, layer.down]
    assert all(matrix is None or isinstance(matrix, CompiledMatrix) for matrix in matrices)
    qkv, output, gate_up, down = (
        matrix.addresses() if isinstance(matrix, CompiledMatrix) else (0, 0) for matrix in matrices
    )
    norms = [address_of(norm) for norm in (layer.qk_norm, layer.post_norm, layer.next_norm)]
    return [*qkv, norms[0], output[0], norms[1], gate_up[0], down[0], norms[2]]
