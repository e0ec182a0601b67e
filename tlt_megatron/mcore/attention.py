"""Causal core attention for Megatron's local layer spec, for CPU and CUDA.

Megatron's own local module builds the whole score matrix and rejects packed sequences. Here each
sequence of a packed micro-batch is attended to alone, without padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention.packed import attend_packed

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType


class SdpaCoreAttention(torch.nn.Module):
    """Drop-in `core_attention` of a Megatron spec, without parameters: causal, without dropout.

    `mcore.transformer` allows no field that asks for other attention.
    """

    def __init__(self, *_: object, softmax_scale: float | None = None, **__: object) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(H)

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
        """Return [P, N*H] from packed [P, N|K, H] each. N and K count this rank's heads."""
        assert attention_mask is None
        assert attention_bias is None
        assert packed_seq_params is not None
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if query.is_cpu:
            return attend_packed(query, key, value, lengths, self.softmax_scale).flatten(1)
        segments = (x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value))
        outputs = [
            F.scaled_dot_product_attention(
                *(x_NTH[None] for x_NTH in segment),
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=query.size(1) != key.size(1),
            )[0]
            for segment in zip(*segments, strict=True)
        ]
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)
