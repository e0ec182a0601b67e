"""A product, and all dense layers of a pass, as one compiled loop each, for few rows on a CPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from tlt_megatron.models import pass_kernels
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.compiled_layer import CompiledNorm, CompiledTables
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.cpu_kernels import KINDS
from tlt_megatron.models.draft_model import DraftConfig
from tlt_megatron.models.layers import DenseLayer, RmsNorm
from tlt_megatron.models.matrix import Matrix

_OUTS, _INS = 4, 16  # a loop computes with multiples of so many rows and columns of a matrix
# Multiplications with all rows up to which it is faster than oneDNN, which costs more per call. One
# or two rows take as long as the memory, and the loop asks it early.
_FEW_MULTIPLICATIONS, _FEW_ROWS = 1_500_000, 2
_SMALL = 200_000  # multiplications of one row


def _max_rows(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the most rows for which the loop is faster with such matrices. 0: it cannot multiply
    with them.
    """
    if any(num_out % _OUTS or num_in % _INS for num_out, num_in in shapes):
        return 0
    return max(_FEW_MULTIPLICATIONS * len(shapes) // sum(map(math.prod, shapes)), _FEW_ROWS)


class CompiledMatrix(Matrix):
    """A matrix that multiplies few rows by the loop, which reads the weight where it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        has_loop = weight.is_contiguous() and weight.dtype in KINDS
        self._max_rows = _max_rows([tuple(weight.shape)]) if has_loop else 0

    @classmethod
    def empty(
        cls,
        num_out: int,
        num_in: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool = False,
    ) -> Matrix:
        """See `Matrix`. The weight is row-major."""
        bias = torch.zeros(num_out, dtype=dtype, device=device) if has_bias else None
        return cls(torch.zeros(num_out, num_in, dtype=dtype, device=device), bias)

    def takes(self, num_rows: int) -> bool:
        """Return whether the loop multiplies so many rows."""
        return num_rows <= self._max_rows

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        (num_out, num_in), num_rows = self._weight.shape, x.shape[0]
        if not self.takes(num_rows) or (addend is not None and self._bias is not None):
            return super().__call__(x, addend)
        assert x.shape[1] == num_in  # the loop takes sizes on trust
        assert x.dtype == self._weight.dtype
        x, out = x.contiguous(), x.new_empty(num_rows, num_out)
        row = 0 if addend is None else addend.stride(0)
        added = _address(self._bias if addend is None else addend), row
        sizes = num_rows, num_out, num_in, KINDS[x.dtype]
        weight = self._weight.data_ptr()
        pass_kernels.multiply(x.data_ptr(), weight, *added, out.data_ptr(), *sizes)
        return out


def layer_shapes(sizes: ModelConfig | DraftConfig) -> list[tuple[int, int]]:
    """Return the rows and columns of the matrices of a layer, the heads' first."""
    s = sizes
    queries = s.num_heads * s.head_dim
    fused = queries + 2 * s.num_kv_heads * s.head_dim
    hidden, ffn = s.hidden_size, s.ffn_size
    return [(fused, hidden), (hidden, queries), (2 * ffn, hidden), (hidden, ffn)]


def is_small(sizes: ModelConfig | DraftConfig) -> bool:
    """Return whether the loop is about as fast as oneDNN for passes of any number of rows."""
    shapes = layer_shapes(sizes)
    return _max_rows(shapes) > 0 and max(map(math.prod, shapes)) <= _SMALL


class CompiledPass:
    """The layers of a policy or a drafter. Call `takes`, then the object.

    Weights are read where they are, so they may change.
    """

    def __init__(
        self,
        sizes: ModelConfig | DraftConfig,
        layers: Sequence[DenseLayer],
        norm: RmsNorm,
        *,
        has_all_rows: bool = False,
    ) -> None:
        """`has_all_rows`: take passes of any number of rows."""
        assert isinstance(norm, CompiledNorm)
        self._norm, self._layers, s = norm, layers, sizes
        heads = s.num_heads, s.num_kv_heads, s.head_dim
        self._shape = s.hidden_size, *heads, s.ffn_size, layers[0].down.itemsize
        shapes = layer_shapes(s)
        self._num_fused, num_queries = shapes[0][0], shapes[1][1]
        self._room_size = self._num_fused + num_queries + 3 * s.ffn_size + s.hidden_size
        self._addresses = np.array([list(map(_address, layer)) for layer in layers])
        given = shapes[1:] if layers[0].qkv is None else shapes
        self._max_rows = sys.maxsize if has_all_rows else _max_rows(given)

    def takes(self, num_rows: int, attention: Attention) -> bool:
        """Return whether a pass of so many rows is faster here."""
        return num_rows <= self._max_rows and isinstance(attention, CompiledTables)

    def __call__(
        self,
        x_PD: Tensor,
        normed_PD: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: Attention,
        *,
        heads_PA: Tensor | None = None,
        tap_layers: Collection[int] = (),
    ) -> list[Tensor]:
        """Run the layers. Return the residual stream after each of `tap_layers`, ascending.

        `x_PD` becomes the residual stream after the last layer, and `normed_PD` its norm. At the
        start `normed_PD` is the norm of x, unless the `heads_PA` of a layer without qkv are given,
        which are changed.
        """
        assert isinstance(attention, CompiledTables)
        num_layers = len(self._layers)
        taps = {layer: torch.empty_like(x_PD) for layer in sorted(tap_layers)}
        caches = attention.caches(num_layers)
        num_pairs, num_slots, head_dim = caches[0].shape
        # The loop takes sizes on trust.
        assert (num_pairs // 2, head_dim) == self._shape[2:4]
        assert x_PD.dtype == caches[0].dtype == self._layers[0].down.dtype
        assert x_PD.is_contiguous()
        assert normed_PD.is_contiguous()
        to_caches = np.array([kv_KTH.data_ptr() for kv_KTH in caches])
        start = 0
        # A part sees no later one.
        for slots, places, lengths in attention.parts():
            part = slice(start, start + len(slots))
            x, normed, (cos, sin) = x_PD[part], normed_PD[part], (each[part] for each in angles)
            rooms = x.new_empty(len(x) * self._room_size)
            heads, heads_row = rooms, self._num_fused
            if heads_PA is not None:
                heads, heads_row = heads_PA[part], heads_PA.stride(0)
            to_taps = np.zeros(num_layers, np.int64)
            for layer, tap in taps.items():
                to_taps[layer] = tap[part].data_ptr()
            addresses = x.data_ptr(), normed.data_ptr(), heads.data_ptr(), rooms.data_ptr()
            read = slots, places, lengths, num_slots
            rotation = cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[2] // 2
            sizes = heads_row, self._norm.value, self._shape, KINDS[x.dtype]
            weights = self._addresses, to_caches, to_taps
            pass_kernels.run_layers(addresses, *weights, read, rotation, *sizes)
            start = part.stop
        return list(taps.values())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
