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
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType


class SdpaCoreAttention(torch.nn.Module):
    """Drop-in `core_attention` of a Megatron spec, without parameters.

    ValueError for context parallelism, sliding windows, softmax offsets and other masks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("context_parallel_size", config.context_parallel_size, 1),
            ("window_size", config.window_size, None),
            ("softmax_type", config.softmax_type, "vanilla"),
            ("apply_query_key_layer_scaling", config.apply_query_key_layer_scaling, False),
            ("attention mask", attn_mask_type.name, "causal"),
            ("attention_type", attention_type, "self"),
        ):
            if value != allowed:
                raise ValueError(
                    f"{name}={value!r} of layer {layer_number}:"
                    f" the local attention does {allowed!r} only"
                )
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(H)
        self.dropout = config.attention_dropout

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
        """Packed: [P, N|K, H] each -> [P, N*H]. Plain: [T, B, N|K, H] each -> [T, B, N*H].

        N and K count this rank's heads.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "attention_mask and attention_bias must be None:"
                " attention is causal, sequences are kept apart by packing"
            )
        if packed_seq_params is not None:
            return self._attend_packed(query, key, value, packed_seq_params.cu_seqlens_q)
        out_BNTH = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
        return out_BNTH.permute(2, 0, 1, 3).flatten(2)

    def _attend_packed(
        self, query_PNH: Tensor, key_PKH: Tensor, value_PKH: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        lengths = cu_seqlens.diff().tolist()
        if sum(lengths) != query_PNH.size(0):
            raise ValueError(
                f"cu_seqlens ends at {sum(lengths)}: must cover all"
                f" P={query_PNH.size(0)} packed tokens"
            )
        if query_PNH.is_cpu and not self.dropout:
            out_PNH = attend_packed(query_PNH, key_PKH, value_PKH, lengths, self.softmax_scale)
            return out_PNH.flatten(1)
        segments = zip(
            *(x.transpose(0, 1).split(lengths, dim=1) for x in (query_PNH, key_PKH, value_PKH)),
            strict=True,
        )
        outputs = [self._attend(*(x.unsqueeze(0) for x in segment))[0] for segment in segments]
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)

    def _attend(self, query_BNTH: Tensor, key_BKTH: Tensor, value_BKTH: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query_BNTH,
            key_BKTH,
            value_BKTH,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query_BNTH.size(1) != key_BKTH.size(1),
        )
