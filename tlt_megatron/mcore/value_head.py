"""The critic's output layer: one value per position, in place of the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class ValueHead(torch.nn.Linear):
    """A linear layer D -> 1 without bias, the same on every tensor-parallel rank. Values begin at
    0.

    Under sequence parallelism a rank computes the values of its part of the sequence and gathers
    the others. The weight then carries Megatron's mark for "sum my gradient over the ranks".
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        torch.nn.init.zeros_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self,
        hidden_TBD: Tensor,
        weight: None = None,  # noqa: ARG002
        runtime_gather_output: bool | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, None]:
        """Return values [T, B, 1] float32 and no bias, as Megatron's output layers do."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        # bfloat16 would round a value near 1 to steps of 0.008
        values_TB1 = linear(hidden_TBD.float(), self.weight.float())
        # Every rank computes the whole loss, so its own part of the gradient is complete.
        return gather_from_sequence_parallel_region(
            values_TB1, tensor_parallel_output_grad=False
        ), None
