"""Decides which drafter the engines get: a candidate that accepts no less than the published one.

Both are measured on responses that no session has trained on. Every rank decides alone, from
results merged over all ranks (`HoldoutResult.merge`). The target changes in every RL step, so both
drafters are measured anew, on the same rows. The measure is the expected overlap of distributions,
not a sample. So only the choice of the rows adds noise, and it adds the same to both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import DraftBatch
from tlt_megatron.models.hf_io import checksum_tensors

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDrafter:
    """Weights as the engines get them."""

    weights: Mapping[str, Tensor]  # trainable tensors under their own names, on the CPU
    version: int
    checksum: int


class DrafterPublisher:
    """Holds the published drafter, and decides on candidates.

    The tensors that it gets must not change afterwards.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], version: int = 0, num_refused: int = 0
    ) -> None:
        """`weights` are those of the drafter that the engines start with. A resumed run passes the
        `record` of the saved one, too.
        """
        self.published = PublishedDrafter(
            weights=weights, version=version, checksum=checksum_tensors(weights.items())
        )
        self.num_refused = num_refused

    def consider(
        self,
        candidate: Mapping[str, Tensor],
        checksum: int,
        *,
        measured: HoldoutResult,
        published: HoldoutResult,
    ) -> bool:
        """Publish `candidate` if it accepts no less. Returns whether it is published.

        `checksum` is its `checksum_tensors`. A drafter that accepts nan is never published.
        """
        new, old = measured.accept_length, published.accept_length
        if math.isfinite(new) and not new < old:  # a published drafter may accept nan, too
            self.published = PublishedDrafter(
                weights=candidate, version=self.published.version + 1, checksum=checksum
            )
            return True
        self.num_refused += 1
        log.info("drafter candidate refused: it accepts %.3f, the published one %.3f", new, old)
        return False

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the current state."""
        return {
            "drafter/version": float(self.published.version),
            "drafter/num_refused": float(self.num_refused),
        }

    def record(self) -> dict[str, int]:
        """Return the state except the weights, as JSON types."""
        return {"version": self.published.version, "num_refused": self.num_refused}
