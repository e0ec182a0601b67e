"""The policy as the algorithm sees it. `mcore.policy_model.McorePolicyModel` satisfies this; so do test fakes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tlt_megatron.types import (
    LossFunction,
    LossResult,
    MicroBatch,
    OptimizerStats,
    TokenLogprobs,
)

__all__ = ["HiddenTap", "LossFunction", "LossResult", "OptimizerStats", "PolicyModel"]


class HiddenTap(Protocol):
    """Takes what a drafter trains on out of a forward pass of the policy. Between its maker and the model; nobody here looks inside.

    `mcore.hidden_tap.HiddenStateTap` is the one that `McorePolicyModel` takes.
    """

    def stats(self) -> dict[str, float]:
        """What it took, as metrics."""


class PolicyModel(Protocol):
    """A trainable policy over this rank's shard. Every method is a collective of the ranks of the model:
    tensor- and pipeline-parallel peers pass the same micro-batches, data-parallel peers their own share."""

    def infer_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        *,
        reference: bool = False,
        tap: HiddenTap | None = None,
    ) -> list[TokenLogprobs]:
        """Forward only; the result is on every pipeline stage, on the CPU. `reference` uses the frozen initial weights.
        `tap`, on all ranks or none, changes nothing of the result."""

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        loss_fn: LossFunction,
        *,
        tap: HiddenTap | None = None,
    ) -> dict[str, float]:
        """Accumulate gradients of all micro-batches; returns the metric sums of this data-parallel rank's
        micro-batches, on every pipeline stage. `loss_fn` is called for each micro-batch in order, on the last stage alone.
        `tap` as in `infer_logprobs`. Must be followed by `optimizer_step`."""

    def optimizer_step(self) -> OptimizerStats:
        """Reduce, clip, step the optimizer and the learning-rate schedule, zero the gradients."""

    def export_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full (unsharded) tensors under their Hugging Face names, on every rank, one at a time."""

    def save(self, path: Path) -> None:
        """Write weights, optimizer, schedule into the empty folder `path` (torch_dist, resharding on load)."""

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, at this or another TP x PP x DP."""
