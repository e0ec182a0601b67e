"""Causal core attention for Megatron's local layer spec, on torch's scaled_dot_product_attention, for CPU and CUDA.

Megatron's own local module builds the whole score matrix and rejects packed sequences. This one runs one SDPA call per sequence
of a packed micro-batch, so sequences do not see each other and no padding is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType


class SdpaCoreAttention(torch.nn.Module):
    """Drop-in `core_attention` of a Megatron spec, without parameters.

    ValueError for what is not supported: context parallelism, sliding windows, softmax offsets, masks other than causal.
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
                    f"{name}={value!r} of layer {layer_number}: the local attention does {allowed!r} only"
                )
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(H)
        self.dropout = config.attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return the attention output. Packed: [P, N|K, H] each -> [P, N*H]. Plain: [T, B, N|K, H] each -> [T, B, N*H].

        N and K count this rank's heads.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "attention_mask and attention_bias must be None: attention is causal, sequences are kept apart by packing"
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
                f"cu_seqlens ends at {sum(lengths)}: must cover all P={query_PNH.size(0)} packed tokens"
            )
        if query_PNH.is_cpu and query_PNH.dtype == torch.bfloat16 and not self.dropout:
            return _FloatBackward.apply(
                query_PNH, key_PKH, value_PKH, lengths, self.softmax_scale
            ).flatten(1)
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


class _FloatBackward(torch.autograd.Function):
    """Packed causal attention on the CPU with torch's own kernels: forward in bfloat16, backward in float32.

    The bfloat16 backward kernel rounds more. It also has a fixed cost per call, which dominates at about a hundred tokens.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query_PNH: Tensor,
        key_PKH: Tensor,
        value_PKH: Tensor,
        lengths: list[int],
        scale: float | None,
    ) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        num_heads = query_PNH.size(1)
        inputs = (query_PNH, _for_queries(key_PKH, num_heads), _for_queries(value_PKH, num_heads))
        out_PNH = torch.empty_like(query_PNH, memory_format=torch.contiguous_format)
        log_sums = []
        for *segment, out_1NTH in _segments((*inputs, out_PNH), lengths):
            attended, log_sum = attend(*segment, 0.0, True, scale=scale)
            out_1NTH.copy_(attended)
            log_sums.append(log_sum)
        ctx.lengths, ctx.scale = lengths, scale
        ctx.save_for_backward(query_PNH, key_PKH, value_PKH, out_PNH, *log_sums)
        return out_PNH

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_PNH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query_PNH, key_PKH, value_PKH, out_PNH, *log_sums = ctx.saved_tensors
        num_heads, num_kv_heads = query_PNH.size(1), key_PKH.size(1)
        inputs = (
            grad_PNH.float(),
            query_PNH.float(),
            _for_queries(key_PKH.float(), num_heads),
            _for_queries(value_PKH.float(), num_heads),
            out_PNH.float(),
        )
        grads: list[list[Tensor]] = []
        for segment, log_sum in zip(_segments(inputs, ctx.lengths), log_sums, strict=True):
            found = differentiate(*segment, log_sum, 0.0, True, scale=ctx.scale)
            grads.append([grad_1NTH[0].transpose(0, 1) for grad_1NTH in found])
        query, key, value = (torch.cat(parts) for parts in zip(*grads, strict=True))
        key, value = (x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (key, value))
        return (*(grad.to(query_PNH.dtype) for grad in (query, key, value)), None, None)


def _for_queries(x_PKH: Tensor, num_heads: int) -> Tensor:
    """Repeat each key or value head for every query head that reads it. Returns [P, N, H]."""
    if x_PKH.size(1) == num_heads:
        return x_PKH
    return x_PKH.repeat_interleave(num_heads // x_PKH.size(1), dim=1)


def _segments(packed: Sequence[Tensor], lengths: list[int]) -> Iterator[tuple[Tensor, ...]]:
    """Yield each sequence of the packed tensors [P, N, H] as [1, N, T, H]."""
    return zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in packed), strict=True)
