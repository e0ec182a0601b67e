"""Accept length of a drafter on hold-out sequences. The trainer measures it, and the publisher compares drafters by it.

Results are stored per batch, so that two drafters are compared on the same rows. They are plain Python numbers: all ranks
wait for the comparison, and for so few values plain arithmetic is faster than tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.drafter.packing import DraftBatch
from tlt_megatron.drafter.trainer import DrafterTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutResult:
    """Acceptance of a drafter on the hold-out slice: sums by [batch][unroll step]."""

    counts: tuple[tuple[float, ...], ...]  # rows that have a prediction
    accepted: tuple[tuple[float, ...], ...]  # overlap of drafter's and target's distributions

    @staticmethod
    def merge(parts: Iterable[HoldoutResult]) -> HoldoutResult:
        """Concatenate the batches of all `parts`, e.g. of all ranks."""
        parts = tuple(parts)
        return HoldoutResult(
            counts=tuple(row for part in parts for row in part.counts),
            accepted=tuple(row for part in parts for row in part.accepted),
        )

    @property
    def num_rows(self) -> int:
        """Return the number of rows with a first drafted token."""
        return round(sum(row[0] for row in self.counts))

    @property
    def accept_length(self) -> float:
        """Return tokens per verify pass of a chain as long as the unroll, bonus token included; nan without rows."""
        if not self.num_rows:
            return math.nan
        return _accept_length(_column_sums(self.counts), _column_sums(self.accepted))

    def standard_error(self, other: HoldoutResult) -> float:
        """Return the jackknife standard error of the difference of both accept lengths; 0 with fewer than two batches."""
        assert self.counts == other.counts, "not the same slice"
        num_batches = len(self.counts)
        if num_batches < 2:
            return 0.0
        pairs = zip(self._left_out_lengths(), other._left_out_lengths(), strict=True)
        differences = [own - others for own, others in pairs]
        mean = sum(differences) / num_batches
        squares = sum((difference - mean) ** 2 for difference in differences)
        return math.sqrt(squares / num_batches * (num_batches - 1))

    def _left_out_lengths(self) -> list[float]:
        """Return a list whose entry i is the accept length without batch i."""
        counts, accepted = _column_sums(self.counts), _column_sums(self.accepted)
        return [
            _accept_length(
                [total - own for total, own in zip(counts, count, strict=True)],
                [total - own for total, own in zip(accepted, overlap, strict=True)],
            )
            for count, overlap in zip(self.counts, self.accepted, strict=True)
        ]


def _column_sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*rows, strict=True)]


def _accept_length(counts: Sequence[float], accepted: Sequence[float]) -> float:
    """Compute the accept length from sums by unroll step. A step without rows accepts nothing."""
    total, alive = 1.0, 1.0
    for count, overlap in zip(counts, accepted, strict=True):
        alive *= overlap / count if count > 0 else 0.0
        total += alive
    return total


@torch.no_grad()
def measure_holdout(
    trainer: DrafterTrainer, weights: Mapping[str, Tensor], batches: Iterable[DraftBatch]
) -> HoldoutResult:
    """Measure the drafter with `weights` on this rank's `batches`. The trainer's own weights are restored afterwards.

    Use many small batches: the standard error is estimated from the differences between batches.
    """
    parameters = dict(trainer.model.named_parameters())
    assert parameters.keys() == weights.keys()
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name].to(parameter)
        results = [trainer.evaluate(batch) for batch in batches]
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
    return HoldoutResult(
        counts=tuple(tuple(result.counts_K.tolist()) for result in results if result.count),
        accepted=tuple(tuple(result.accepted_K.tolist()) for result in results if result.count),
    )
