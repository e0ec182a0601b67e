"""What a drafter would accept on sequences that it is never trained on. Measured by the trainer, judged by the publisher.

Results are kept by batch, so that two drafters can be compared in pairs on the same rows. They are a handful of numbers,
compared while all ranks wait: plain arithmetic is quicker on them than tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.drafter.packing import DraftBatch
from tlt_megatron.drafter.trainer import DrafterTrainer

_NUM_STRATA = 4  # groups by length: fewer would hide the longest, more make rounds too large


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutResult:
    """What a drafter would accept on the held-out slice: sums by [batch][unroll step]."""

    counts: tuple[tuple[float, ...], ...]  # rows that have a prediction
    accepted: tuple[tuple[float, ...], ...]  # overlap of drafter's and target's distributions

    @staticmethod
    def merge(parts: Iterable[HoldoutResult]) -> HoldoutResult:
        """The result over the batches of all `parts`, e.g. of all ranks."""
        parts = tuple(parts)
        return HoldoutResult(
            counts=tuple(row for part in parts for row in part.counts),
            accepted=tuple(row for part in parts for row in part.accepted),
        )

    @property
    def num_rows(self) -> int:
        """Rows whose first drafted token was judged."""
        return round(sum(row[0] for row in self.counts))

    @property
    def accept_length(self) -> float:
        """Tokens per verify pass of a chain as long as the unroll, bonus token included; nan without any row."""
        if not self.num_rows:
            return math.nan
        return _accept_length(_column_sums(self.counts), _column_sums(self.accepted))

    def standard_error(self, other: HoldoutResult) -> float:
        """Of the difference of both accept lengths on the same batches; 0 with fewer than two."""
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
        """Accept length without batch i, at i."""
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
    """By unroll step. A step that nothing reached accepts nothing."""
    total, alive = 1.0, 1.0
    for count, overlap in zip(counts, accepted, strict=True):
        alive *= overlap / count if count > 0 else 0.0
        total += alive
    return total


def choose_slice(steps: Sequence[int], rows: Sequence[int], max_rows: int) -> list[int]:
    """Which sequences to measure on: about `max_rows` rows, the newest RL step first, all lengths alike.

    The sequences of a step are split into `_NUM_STRATA` groups by length, and taken in rounds of one from each group, so
    that long and short ones keep their share of the rows. Within a group they come in the order given. A round that does
    not fit ends the choice; the first is always taken, so long sequences can exceed `max_rows`.

    Example: `choose_slice([7, 7, 7, 7, 7, 6], [900, 40, 30, 20, 50, 10], 100)` is `[3, 2, 1, 0]`: one round of step 7.
    """
    chosen: list[int] = []
    for step in sorted(set(steps), reverse=True):
        by_length = sorted(
            (i for i, s in enumerate(steps) if s == step), key=lambda i: (rows[i], i)
        )
        num_groups = min(_NUM_STRATA, len(by_length))
        bounds = [len(by_length) * group // num_groups for group in range(num_groups + 1)]
        groups = [sorted(by_length[a:b]) for a, b in itertools.pairwise(bounds)]
        for turn in range(max(map(len, groups))):
            picked = [group[turn] for group in groups if turn < len(group)]
            if chosen and sum(rows[i] for i in chosen + picked) > max_rows:
                return chosen
            chosen += picked
    return chosen


@torch.no_grad()
def measure_holdout(
    trainer: DrafterTrainer, weights: Mapping[str, Tensor], batches: Iterable[DraftBatch]
) -> HoldoutResult:
    """What the drafter with `weights` accepts on this rank's `batches`; the trainer's own weights are as before.

    The more batches, the better the noise is known: give small ones.
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
