"""Accept length of a drafter on hold-out sequences, by which the publisher compares drafters.

Results are stored per batch, so that two drafters are compared on the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import DraftBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HoldoutResult:
    """Acceptance of a drafter on N hold-out batches: sums by batch and unroll step."""

    counts_NK: Tensor  # float64: rows that have a prediction
    accepted_NK: Tensor  # float64: overlap of drafter's and target's distributions

    @staticmethod
    def merge(parts: Iterable[HoldoutResult]) -> HoldoutResult:
        """Concatenate the batches of all `parts`, e.g. of all ranks."""
        parts = tuple(parts)
        return HoldoutResult(
            counts_NK=torch.cat([part.counts_NK for part in parts]),
            accepted_NK=torch.cat([part.accepted_NK for part in parts]),
        )

    @property
    def num_rows(self) -> int:
        """Return the number of rows with a first drafted token."""
        return round(self.counts_NK[:, 0].sum().item())

    @property
    def accept_length(self) -> float:
        """Tokens per verify pass of a chain as long as the unroll; nan without rows."""
        if not self.num_rows:
            return math.nan
        return _accept_lengths(self.counts_NK.sum(0), self.accepted_NK.sum(0)).item()

    def standard_error(self, other: HoldoutResult) -> float:
        """Return the jackknife standard error of the difference; 0 with fewer than two batches."""
        assert torch.equal(self.counts_NK, other.counts_NK), "not the same slice"
        num_batches = len(self.counts_NK)
        if num_batches < 2:
            return 0.0
        difference_N = self._left_out_lengths() - other._left_out_lengths()
        return math.sqrt(difference_N.var(correction=0).item() * (num_batches - 1))

    def _left_out_lengths(self) -> Tensor:
        """Return [N]: entry i is the accept length without batch i."""
        return _accept_lengths(
            self.counts_NK.sum(0) - self.counts_NK, self.accepted_NK.sum(0) - self.accepted_NK
        )


def _accept_lengths(counts_K: Tensor, accepted_K: Tensor) -> Tensor:
    """Return accept lengths [...] of sums [..., K]. A step without rows accepts nothing."""
    rates_K = torch.where(counts_K > 0, accepted_K / counts_K, 0.0)
    return 1.0 + rates_K.cumprod(-1).sum(-1)


@torch.no_grad()
def measure_holdout(
    trainer: DrafterTrainer, weights: Mapping[str, Tensor], batches: Iterable[DraftBatch]
) -> HoldoutResult:
    """Measure `weights` on this rank's `batches`, and restore the trainer's own weights.

    Use many small batches: the standard error is estimated from the differences between batches.
    """
    parameters = dict(trainer.model.named_parameters())
    assert parameters.keys() == weights.keys()
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name].to(parameter)
        losses = [trainer.evaluate(batch) for batch in batches]
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
    sums = [torch.stack((one.counts_K, one.accepted_K)) for one in losses if one.count]
    if not sums:
        empty = torch.zeros(0, trainer.num_unroll_steps, dtype=torch.float64)
        return HoldoutResult(counts_NK=empty, accepted_NK=empty)
    counts_NK, accepted_NK = torch.stack(sums, dim=1).to("cpu", torch.float64)
    return HoldoutResult(counts_NK=counts_NK, accepted_NK=accepted_NK)
