"""The critic on Megatron-core, one per rank: satisfies policy.interfaces.CriticModel.

It is the policy's architecture with a value head. Its weights, gradients and optimizer are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tlt_megatron.mcore.schedule import run_forward, token_values
from tlt_megatron.mcore.trained_model import TrainedModel
from tlt_megatron.types import MicroBatch, TokenValues, ValueLossFunction


class McoreCriticModel(TrainedModel):
    """A critic that begins with the weights of the folder `model.path`, and with values of 0."""

    def infer_values(self, micro_batches: Sequence[MicroBatch]) -> list[TokenValues]:
        """See CriticModel."""
        return run_forward(self._model, micro_batches, token_values, TokenValues, self._groups)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_fn: ValueLossFunction
    ) -> dict[str, float]:
        """See CriticModel."""
        return self._forward_backward(micro_batches, token_values, loss_fn)
