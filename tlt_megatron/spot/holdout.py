"""Accept length of a drafter on responses that no session has trained on. The publisher compares
it.
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
    """Acceptance of a drafter: sums by unroll step, which add up over ranks."""

    counts_K: Tensor  # float64: rows that have a prediction
    accepted_K: Tensor  # float64: overlap of drafter's and target's distributions

    @staticmethod
    def merge(parts: Iterable[HoldoutResult]) -> HoldoutResult:
        """Return the sums over all `parts`, e.g. of all ranks."""
        parts = tuple(parts)
        return HoldoutResult(
            counts_K=torch.stack([part.counts_K for part in parts]).sum(0),
            accepted_K=torch.stack([part.accepted_K for part in parts]).sum(0),
        )

    @property
    def num_rows(self) -> int:
        """Return the number of rows with a first drafted token."""
        return round(self.counts_K[0].item())

    @property
    def accept_length(self) -> float:
        """Tokens per verify pass of a chain as long as the unroll; nan without rows.

        A step without rows accepts nothing.
        """
        if not self.num_rows:
            return math.nan
        rates_K = torch.where(self.counts_K > 0, self.accepted_K / self.counts_K, 0.0)
        return 1.0 + rates_K.cumprod(0).sum().item()


def measure_holdout(
    trainer: DrafterTrainer, weights: Mapping[str, Tensor], batch: DraftBatch
) -> HoldoutResult:
    """Measure `weights` on this rank's `batch`, and restore the trainer's own weights."""
    parameters = dict(trainer.model.named_parameters())
    assert parameters.keys() == weights.keys()
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name].to(parameter)
        loss = trainer.evaluate(batch)
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
    counts_K, accepted_K = torch.stack((loss.counts_K, loss.accepted_K)).to("cpu", torch.float64)
    return HoldoutResult(counts_K=counts_K, accepted_K=accepted_K)
