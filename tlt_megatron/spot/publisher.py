"""Decides which drafter the engines get: a candidate that clearly accepts more than the published
one.

Every rank decides alone, from the comparison that all ranks have made together (`holdout.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.runtime.log import FILE_ONLY
from tlt_megatron.spot.holdout import Comparison

log = logging.getLogger(__name__)


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
        self, candidate: Mapping[str, Tensor], checksum: int, comparison: Comparison
    ) -> bool:
        """Publish `candidate` if it accepts more, by more than the standard error. Returns whether
        it is published.

        `checksum` is its `checksum_tensors`.
        """
        new, old = comparison.accept_lengths
        if new - old > comparison.standard_error:
            self.published = PublishedDrafter(
                weights=candidate, version=self.published.version + 1, checksum=checksum
            )
            return True
        self.num_refused += 1
        log.info(
            "the engines keep their drafter, which accepts %.3f: the newer one accepts %.3f",
            *(old, new),
            extra=FILE_ONLY,
        )
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
