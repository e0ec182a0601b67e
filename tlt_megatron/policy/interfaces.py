"""Policy and critic as the algorithm sees them. The models of `mcore/` and test fakes satisfy the
protocols.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from tlt_megatron.types import (
    LossFunction,
    MicroBatch,
    OptimizerStats,
    TokenLogprobs,
    TokenValues,
    ValueLossFunction,
)

if TYPE_CHECKING:
    from tlt_megatron.mcore.hidden_tap import HiddenStateTap


class TrainedModel(Protocol):
    """What is trained, on this rank. Every method is a collective of the model's ranks.

    Tensor- and pipeline-parallel peers pass the same micro-batches. Each data-parallel peer passes
    its own share.
    """

    def optimizer_step(self) -> OptimizerStats:
        """Clip the gradients, step the optimizer and its schedule, zero the gradients."""
        ...

    def leave_device(self) -> None:
        """Free what only updates need, until `enter_device`. Called before an engine takes memory."""

    def enter_device(self) -> None:
        """Be ready for log-probs and updates again."""

    def save(self, path: Path) -> None:
        """Write weights, optimizer and schedule into the empty folder `path` (torch_dist)."""

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, at this or another TP x PP x DP."""


class PolicyModel(TrainedModel, Protocol):
    """A trainable policy over this rank's shard."""

    def infer_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        *,
        reference: bool = False,
        tap: HiddenStateTap | None = None,
    ) -> list[TokenLogprobs]:
        """Run forward only; the result is on every pipeline stage, on the CPU.

        `reference` uses the frozen initial weights. `tap` gets the hidden states of the pass and
        does not change the result. It must be passed on all ranks or on none.
        """
        ...

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        loss_fn: LossFunction,
        *,
        tap: HiddenStateTap | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradients of all micro-batches; return metric sums on every stage.

        Sums are over the micro-batches of this data-parallel rank, under the same keys on every
        rank. `loss_fn` is called for each micro-batch in order, only on the last stage. `tap` as in
        `infer_logprobs`. Call `optimizer_step` next.
        """
        ...

    def export_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full (unsharded) tensors under their Hugging Face names, on every rank."""
        ...


class CriticModel(TrainedModel, Protocol):
    """A trainable critic over this rank's shard: the expected return at each position."""

    def infer_values(self, micro_batches: Sequence[MicroBatch]) -> list[TokenValues]:
        """Run forward only; the result is on every pipeline stage, on the CPU."""
        ...

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_fn: ValueLossFunction
    ) -> dict[str, float]:
        """As that of PolicyModel, with values."""
        ...
