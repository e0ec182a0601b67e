"""DRAFT of a chain as one compiled loop on a CPU. As with a captured graph on CUDA, no call from
Python lies between two depths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_megatron.models import pass_kernels
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.compiled_layer import CompiledTables
from tlt_megatron.models.compiled_pass import CompiledMatrix, CompiledPass
from tlt_megatron.models.cpu_kernels import KINDS
from tlt_megatron.models.draft_model import DraftConfig
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
    ) -> None:
        assert isinstance(inputs, CompiledMatrix)
        assert isinstance(head, CompiledMatrix)
        self._layer, self._embedding = layer, embedding_VD
        self._matrices = *inputs.addresses(), head.addresses()[0]
        self._widths = inputs.num_out, config.head_start, config.is_eagle3

    def takes(self, attention: Attention) -> bool:
        """Return whether the loop drafts after pairs with such an attention."""
        is_one_part = isinstance(attention, CompiledTables) and len([*attention.parts()]) == 1
        return is_one_part and self._layer.takes(attention)

    def __call__(
        self,
        token_ids_P: Tensor,
        hidden_PD: Tensor,
        position_ids_P: Tensor,
        attention: Attention,
        offsets_BDV: Tensor,
        scale: float,
    ) -> Tensor:
        """Compute pairs as `DraftInference.forward` does, the last ones of B rows. Return [B, D]:
        the tokens with the largest draft logit * scale + offset at each of D depths after them.
        """
        assert isinstance(attention, CompiledTables)
        assert self._embedding.dtype == hidden_PD.dtype  # the loop takes it on trust
        hidden_PD = hidden_PD.contiguous()
        (num_rows, depth, num_ids), (num_pairs, size) = offsets_BDV.shape, hidden_PD.shape
        logits_BV, newest_BD = (hidden_PD.new_empty(num_rows, n) for n in (num_ids, size))
        widths = 2 * size, self._widths[0], size, size, self._layer.room_size
        rooms = [hidden_PD.new_empty(num_pairs, width) for width in widths]
        tokens_BD = torch.empty(num_rows, depth, dtype=torch.int64)
        (part,) = attention.parts()
        keys, layer = (*part, *attention.cache()), self._layer
        pairs = token_ids_P.numpy(), hidden_PD.data_ptr(), position_ids_P.numpy()
        rows = logits_BV.data_ptr(), newest_BD.data_ptr(), tuple(room.data_ptr() for room in rooms)
        matrices = self._embedding.data_ptr(), *self._matrices
        scores = offsets_BDV.contiguous().numpy(), scale
        weights, sizes = (layer.addresses, keys, layer.table()), (num_ids, *self._widths)
        of_layer = layer.eps, layer.shape, KINDS[hidden_PD.dtype]
        written = tokens_BD.numpy()
        pass_kernels.draft_chains(
            written, pairs, rows, matrices, *weights, scores, sizes, *of_layer
        )
        return tokens_BD
