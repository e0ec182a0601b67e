"""RMSNorm for Megatron's local layer spec. Megatron's own torch wrapper refuses sequence parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that a Megatron spec calls.

    Under sequence parallelism a rank sees only its part of the sequence. The weight then carries Megatron's mark for "sum my
    gradient over the tensor-parallel ranks". Query and key norms see whole sequences but only their rank's heads. Megatron
    recognizes those by name and sums their gradients too.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
