"""Decides which drafter the engines get: a candidate that accepts no less than the best so far.

Every rank decides alone, from results merged over all ranks (`HoldoutResult.merge`). The target
changes in every RL step, so candidate, published and best drafter are all measured again, on the
same hold-out batches. The measure is the expected overlap of distributions, not a sample, so only
the choice of the slice adds noise: the standard error of the difference (jackknife). A candidate is
refused if it is worse than the best by more than one standard error. With many batches an equally
good one is refused in 16 % of cases, and one worse by 2 standard errors is published in 16 %. The
bar is the best drafter, not the last published one, so these errors do not accumulate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.spot.holdout import HoldoutResult

log = logging.getLogger(__name__)

_TOLERANCE = 1.0  # standard errors by which a published candidate may be worse than the best


def copy_to_host(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU, without gradients."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDrafter:
    """Weights as the engines get them."""

    weights: dict[str, Tensor]  # trainable tensors under their own names, on the CPU
    version: int
    checksum: int

    @staticmethod
    def copy_of(
        weights: Mapping[str, Tensor], version: int, checksum: int | None = None
    ) -> PublishedDrafter:
        """Copy the weights to the CPU, because the trainer changes its own in place."""
        copies = copy_to_host(weights)
        checksum = checksum_tensors(weights.items()) if checksum is None else checksum
        return PublishedDrafter(weights=copies, version=version, checksum=checksum)


class PublishAction(StrEnum):
    """The decision on the engines' drafter."""

    PUBLISH = "publish"  # publish the candidate
    RESTORE = "restore"  # publish the best so far again: the published one is worse now
    KEEP = "keep"  # change nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishDecision:
    """The result of `consider`. Unless it is KEEP, the engines must load `published`."""

    action: PublishAction
    reason: str
    metrics: dict[str, float]


class DrafterPublisher:
    """Holds the published and the best drafter, and decides on candidates.

    Call `consider` at each phase boundary.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """`weights` are those of the drafter that the engines start with, as version 0."""
        self.published = PublishedDrafter.copy_of(weights, 0)  # what the engines hold
        self.best = self.published  # what accepted most at the last comparison
        self.best_accept_length = math.nan  # accept length of the best at the last comparison
        self.num_refused = 0

    def consider(
        self, candidate: Mapping[str, Tensor], checksum: int, measured: Mapping[int, HoldoutResult]
    ) -> PublishDecision:
        """Decide on `candidate` (trainable tensors), whose `checksum_tensors` is `checksum`.

        `measured` holds the results of the candidate, the published and the best drafter, by
        checksum. They must be of the same slice and of the current target.
        """
        new, published = measured[checksum], self.published
        objection = ""
        if checksum == published.checksum:
            objection = "the candidate is what is published"
        elif not all(_is_finite(tensor) for tensor in candidate.values()):
            objection = "the candidate has weights that are not finite"
        action, reason = self._choose(
            new, measured[published.checksum], measured[self.best.checksum], objection
        )
        if action == PublishAction.PUBLISH:
            self.published = PublishedDrafter.copy_of(candidate, published.version + 1, checksum)
        elif action == PublishAction.RESTORE:
            self.published = replace(self.best, version=published.version + 1)
        if action != PublishAction.PUBLISH and checksum != published.checksum:
            self.num_refused += 1
            log.info("drafter candidate refused: %s", reason)
        now = measured[self.published.checksum].accept_length
        kept = measured[self.best.checksum].accept_length
        if now >= kept or math.isnan(kept):
            self.best, kept = self.published, now
        self.best_accept_length = kept
        lengths = {"candidate": new.accept_length, "published": now, "best": kept}
        metrics = {f"drafter/holdout_accept_length/{name}": v for name, v in lengths.items()}
        metrics["drafter/holdout_rows"] = float(new.num_rows)
        metrics["drafter/is_published"] = float(action != PublishAction.KEEP)
        return PublishDecision(action=action, reason=reason, metrics=metrics | self.metrics())

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the current state."""
        return {
            "drafter/version": float(self.published.version),
            "drafter/num_refused": float(self.num_refused),
        }

    def _choose(
        self, new: HoldoutResult, old: HoldoutResult, best: HoldoutResult, objection: str
    ) -> tuple[PublishAction, str]:
        if not objection and not new.num_rows:
            # There is no hold-out, or the buffer is still empty: publish without a comparison.
            return PublishAction.PUBLISH, "not compared: the held-out slice is empty"
        if not objection and not self._is_worse(new, best):
            return PublishAction.PUBLISH, f"accepts {new.accept_length:.3f}"
        reason = objection or f"accepts {new.accept_length:.3f}, the best {best.accept_length:.3f}"
        if new.num_rows and self._is_worse(old, best):
            reason += (
                f"; the published one accepts only {old.accept_length:.3f}, so the best returns"
            )
            return PublishAction.RESTORE, reason
        return PublishAction.KEEP, reason

    def _is_worse(self, one: HoldoutResult, other: HoldoutResult) -> bool:
        """Return whether `one` is worse by more than the noise. NaN is always worse."""
        if math.isnan(other.accept_length):
            return math.isnan(one.accept_length)
        difference = one.accept_length - other.accept_length
        return not difference >= -_TOLERANCE * one.standard_error(other)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights, not copied: `published.*`, and `best.*` if it is another one."""
        state = {f"published.{name}": t for name, t in self.published.weights.items()}
        if self.best.checksum != self.published.checksum:
            state |= {f"best.{name}": t for name, t in self.best.weights.items()}
        return state

    def record(self) -> dict[str, object]:
        """Return the rest of the state as JSON types. JSON has no NaN, so it becomes None."""
        return {
            "published_version": self.published.version,
            "best_version": self.best.version,
            "best_accept_length": _to_json(self.best_accept_length),
            "num_refused": self.num_refused,
        }

    def load_state_dict(self, state: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Load the results of `state_dict` and `record`."""
        parts: dict[str, dict[str, Tensor]] = {"published": {}, "best": {}}
        for key, tensor in state.items():
            part, _, name = key.partition(".")
            if part not in parts:
                raise ValueError(f"publisher state: {key} is unknown; published.* or best.*")
            parts[part][name] = tensor
        self.published = PublishedDrafter.copy_of(
            parts["published"], int(record["published_version"])
        )
        self.best = self.published
        if parts["best"]:
            self.best = PublishedDrafter.copy_of(parts["best"], int(record["best_version"]))
        self.best_accept_length = _from_json(record["best_accept_length"])
        self.num_refused = int(record["num_refused"])


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite: the extremes show both NaN and infinity."""
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def _to_json(value: float) -> float | None:
    return None if math.isnan(value) else value


def _from_json(value: float | None) -> float:
    return math.nan if value is None else value
