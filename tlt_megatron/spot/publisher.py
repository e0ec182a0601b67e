"""Decides which drafter the engines get: a candidate that accepts no less than the published one.

Every rank decides alone, from results merged over all ranks (`HoldoutResult.merge`). The target
changes in every RL step, so candidate and published drafter are both measured anew, on the same
rows. The measure is the expected overlap of distributions, not a sample, so only the choice of the
rows adds noise, and it adds the same to both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.spot.holdout import HoldoutResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDrafter:
    """Weights as the engines get them."""

    weights: Mapping[str, Tensor]  # trainable tensors under their own names, on the CPU
    version: int
    checksum: int

    @staticmethod
    def of(weights: Mapping[str, Tensor], version: int) -> PublishedDrafter:
        """Compute the checksum, too."""
        checksum = checksum_tensors(weights.items())
        return PublishedDrafter(weights=weights, version=version, checksum=checksum)


class DrafterPublisher:
    """Holds the published drafter, and decides on candidates.

    The tensors that it gets must not change afterwards.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """`weights` are those of the drafter that the engines start with, as version 0."""
        self.published = PublishedDrafter.of(weights, 0)
        self.num_refused = 0

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

    def load(self, weights: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Load the published weights and the result of `record`."""
        self.published = PublishedDrafter.of(weights, int(record["version"]))
        self.num_refused = int(record["num_refused"])
