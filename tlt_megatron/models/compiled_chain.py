"""Chains of drafted tokens in one compiled loop on a CPU. As with a captured graph on CUDA, no call
from Python lies between two depths.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tlt_megatron.models import pass_kernels
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.compiled_layer import CompiledTables
from tlt_megatron.models.compiled_pass import CompiledMatrix, CompiledPass
from tlt_megatron.models.cpu_kernels import KINDS
from tlt_megatron.models.draft_model import DraftConfig
from tlt_megatron.models.layers import RotaryTable
from tlt_megatron.models.matrix import Matrix


class CompiledChains:
    """Drafts with an EAGLE or EAGLE-3 drafter. Call `takes`, then the object."""

    def __init__(
        self,
        config: DraftConfig,
        layer: CompiledPass,
        inputs: Matrix,
        head: Matrix,
        embedding_VD: Tensor,
        rotary: RotaryTable,
    ) -> None:
        assert isinstance(inputs, CompiledMatrix)
        assert isinstance(head, CompiledMatrix)
        self._layer, self._embedding, self._rotary = layer, embedding_VD, rotary
        self._matrices = *inputs.addresses(), head.addresses()[0]
        self._widths = inputs.num_out, config.head_start, config.is_eagle3

    def takes(self, attention: Attention) -> bool:
        """Return whether the loop drafts over such an attention."""
        return self._layer.takes(attention)

    def __call__(
        self,
        hidden_BD: Tensor,
        positions_B: Tensor,
        attention: Attention,
        root_logits_BV: Tensor,
        offsets_BDV: Tensor,
        scale: float,
    ) -> Tensor:
        """Return the tokens of chains: see `tree.DraftChains`.

        `hidden_BD` are the drafter's states of the pairs before the roots, `positions_B` the
        positions of the roots, and `attention` that of a pass over these positions.
        """
        assert isinstance(attention, CompiledTables)
        assert self._embedding.dtype == hidden_BD.dtype  # the loop takes it on trust
        (num_rows, depth, num_ids), size = offsets_BDV.shape, hidden_BD.shape[1]
        num_angles = self._rotary.table_SH2.shape[1]
        kept = [root_logits_BV.clone(), hidden_BD.clone()]
        for width in (2 * size, self._widths[0], size, size, num_angles, self._layer.room_size):
            kept.append(hidden_BD.new_empty(num_rows, width))
        tokens_BD = torch.empty(num_rows, depth, dtype=torch.int64)
        ((slots, places, lengths),) = attention.parts()
        (cache,) = attention.caches(1)
        pass_kernels.draft_chains(
            tokens_BD.numpy(),
            tuple(tensor.data_ptr() for tensor in kept),
            (self._embedding.data_ptr(), *self._matrices),
            (self._layer.addresses, np.array([cache.data_ptr()]), np.zeros(1, np.int64)),
            (slots, places, lengths, cache.shape[1]),
            (self._rotary.table_SH2.data_ptr(), positions_B.numpy(), num_angles // 4),
            (offsets_BDV.contiguous().numpy(), scale),
            (num_ids, *self._widths),
            self._layer.eps,
            self._layer.shape,
            KINDS[hidden_BD.dtype],
        )
        return tokens_BD
