"""Policy and critic as the algorithm sees them. The models of `mcore/` and test fakes satisfy the
protocols.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.types import (
    LossFunction,
    MicroBatch,
    OptimizerStats,
    TokenLogprobs,
    TokenValues,
    ValueLossFunction,
)


class Tap(Protocol):
    """Gets hidden states of forward passes of the policy, which train the drafter."""

    def choose(self, lengths: Sequence[int], groups: ProcessGroups) -> list[int]:
        """Return the indices of the sequences that are worth a pass for the tap alone."""
        ...

    def record(
        self, stage: Sequence[Any], micro_batches: Sequence[MicroBatch], groups: ProcessGroups
    ) -> AbstractContextManager[None]:
        """Record while `stage`, the model's modules on this rank, runs the micro-batches."""
        ...


class SavedModel(Protocol):
    """What a checkpoint holds. Every method is a collective of the model's ranks."""

    def save(self, path: Path) -> None:
        """Write weights, and optimizer and schedule if there are any, into the empty folder `path`
        (torch_dist).
        """

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, at this or another layout."""


class TrainedModel(SavedModel, Protocol):
    """What is trained, on this rank. Every method is a collective of the model's ranks.

    Tensor-, context- and pipeline-parallel peers pass the same micro-batches. Each data-parallel
    peer passes its own share.
    """

    def optimizer_step(self, skipped_count: int = 0) -> OptimizerStats:
        """Average the gradients of all ranks, clip, step the optimizer and its schedule.

        The divisor is the count of the loss over all micro-batches since the last step, plus
        `skipped_count`: this data-parallel rank's responses without a gradient.
        """
        ...

    def leave_device(self) -> None:
        """Free what only updates need, until `enter_device`. Called before an engine takes
        memory.
        """

    def enter_device(self) -> None:
        """Be ready for log-probs and updates again."""


class PolicyModel(TrainedModel, Protocol):
    """A trainable policy over this rank's shard."""

    def infer_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        *,
        reference: bool = False,
        tap: Tap | None = None,
    ) -> list[TokenLogprobs]:
        """Run forward only; the result is on every pipeline stage, on the CPU.

        `reference` uses the frozen initial weights, or those of another folder. `tap` gets
        the hidden states of the pass and does not change the result. It must be passed on all ranks
        or on none.
        """
        ...

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        loss_fn: LossFunction,
        *,
        tap: Tap | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradients of all micro-batches; return metric sums on every stage.

        Sums are over these micro-batches. `loss_fn` is called for each in order, only on the last
        stage. `tap` as in `infer_logprobs`. Data-parallel ranks need not call it together, and may
        call it several times before `optimizer_step`.
        """
        ...

    def refresh_reference(self) -> None:
        """Give the reference, which must be a second model, the policy's weights."""

    def export_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full (unsharded) tensors under their Hugging Face names, on every rank."""
        ...

    def gather_adapters(self) -> dict[str, Tensor]:
        """Return the whole LoRA factors under PEFT's names, in host memory of every rank."""
        ...


class CriticModel(TrainedModel, Protocol):
    """A trainable critic over this rank's shard: the expected return at each position."""

    def infer_values(self, micro_batches: Sequence[MicroBatch]) -> list[TokenValues]:
        """Run forward only; the result is on every pipeline stage, on the CPU."""
        ...

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_fn: ValueLossFunction
    ) -> dict[str, float]:
        """See `PolicyModel.forward_backward`. `loss_fn` gets values."""
        ...
