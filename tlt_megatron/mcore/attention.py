"""Causal core attention for Megatron's local layer spec, for CPU and CUDA.

Megatron's own local module builds the whole score matrix, and rejects packed sequences and context
parallelism. Here each sequence of a packed micro-batch is attended to alone, without padding
between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from tlt_megatron.models.attention.packed import attend_packed

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType


class SdpaCoreAttention(torch.nn.Module):
    """Drop-in `core_attention` of a Megatron spec, without parameters: causal, without dropout.

    `mcore.transformer` allows no field that asks for other attention.
    """

    def __init__(
        self,
        *_: object,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **__: object,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(H)
        self.cp = None if pg_collection is None else pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [P, N*H] from packed [P, N|K, H] each. N and K count this rank's heads.

        With context parallelism, P counts this rank's tokens (token_places.py).
        """
        assert attention_mask is None
        assert attention_bias is None
        assert packed_seq_params is not None
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if self.cp is not None and self.cp.size() > 1:
            return self._attend_chunks(query, torch.cat((key, value), dim=1), lengths, self.cp)
        if query.is_cpu:
            return attend_packed(query, key, value, lengths, self.softmax_scale).flatten(1)
        segments = (x.split(lengths) for x in (query, key, value))
        outputs = [self._attend(*segment) for segment in zip(*segments, strict=True)]
        return torch.cat(outputs).flatten(1)

    def _attend_chunks(
        self,
        query_PNH: Tensor,
        kv_PKH: Tensor,
        lengths: Sequence[int],
        cp: torch.distributed.ProcessGroup,
    ) -> Tensor:
        """All-gather keys and values, and let each of this rank's chunks attend to those up to its
        end.

        `lengths` are those of the whole sequences.
        """
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        size, rank = cp.size(), cp.rank()
        own_lengths = [length // size for length in lengths]
        gathered = gather_from_sequence_parallel_region(kv_PKH, group=cp).unflatten(0, (size, -1))
        outputs = []
        for query_TNH, kv in zip(
            query_PNH.split(own_lengths), gathered.split(own_lengths, dim=1), strict=True
        ):
            first, second = kv.chunk(2, dim=1)  # the ranks' second chunks are in reverse order
            kv_TKH = torch.cat((first.flatten(0, 1), second.flip(0).flatten(0, 1)))
            for chunk_TNH, number in zip(
                query_TNH.chunk(2), (rank, 2 * size - 1 - rank), strict=True
            ):
                seen = kv_TKH[: (number + 1) * chunk_TNH.size(0)]
                outputs.append(self._attend(chunk_TNH, *seen.chunk(2, dim=1)))
        return torch.cat(outputs).flatten(1)

    def _attend(self, query_TNH: Tensor, key_SKH: Tensor, value_SKH: Tensor) -> Tensor:
        """Return causal attention [T, N, H], where the last query is at the last key."""
        out_1NTH = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (query_TNH, key_SKH, value_SKH)),
            attn_mask=causal_lower_right(query_TNH.size(0), key_SKH.size(0)),
            scale=self.softmax_scale,
            enable_gqa=query_TNH.size(1) != key_SKH.size(1),
        )
        return out_1NTH[0].transpose(0, 1)
