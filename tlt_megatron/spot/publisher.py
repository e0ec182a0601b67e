"""Decides which drafter the engines get: a candidate is published if it accepts no less than the best drafter so far.

Called by spot/lifecycle.py at each phase boundary. The decision is deterministic and local: every rank decides alone,
from results merged over all ranks (`HoldoutResult.merge`). The target changes in every RL step, so older measurements do not
apply. Candidate, published and best drafter are all measured again, on the same hold-out batches, with the current target.

Noise of a comparison: all drafters get the same rows, and the measure is the expected overlap of distributions, not a sample.
Only the choice of the slice adds noise. Its size is the standard error of the difference, by leaving out one batch at a time
(jackknife). A candidate is refused if it is worse than the best by more than `tolerance` standard errors (default 1). Then an
equally good candidate is refused in 16 % of cases, and one worse by 2 standard errors is published in 16 %. Both hold for
many batches; with few batches the standard error is only a rough estimate. The bar is the best drafter, not the last
published one, so these errors do not accumulate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from tlt_megatron.models.hf_io import CHECKSUM_MODULUS, checksum_tensor
from tlt_megatron.spot.collapse import RunningLevel, from_json, to_json
from tlt_megatron.spot.holdout import HoldoutResult

log = logging.getLogger(__name__)

_QUIET_PHASES = (
    3  # phases without a sign of collapse, after which a suspended drafter is tried again
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDrafter:
    """Weights as the engines get them."""

    weights: dict[str, Tensor]  # trainable tensors under their own names, on the CPU
    version: int
    checksum: int


class PublishAction(StrEnum):
    """The decision on the engines' drafter."""

    PUBLISH = "publish"  # publish the candidate
    RESTORE = "restore"  # publish the best so far again: the published one is worse now
    KEEP = "keep"  # change nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishDecision:
    """The result of `consider`. With action KEEP the engines already hold `drafter`; else they must load it."""

    action: PublishAction
    drafter: PublishedDrafter
    reason: str
    is_alarmed: bool  # while True: speculate by n-gram or not at all
    metrics: dict[str, float]


class DrafterPublisher:
    """Holds the published and the best drafter, decides on candidates, and watches for a collapse.

    Call `start` first, then `observe_live` once per phase and `consider` at each phase boundary. With `spot.publish=live`,
    `adopt` replaces `consider` for a drafter that was offered during a rollout.
    """

    def __init__(
        self, *, tolerance: float = 1.0, collapse_share: float = 0.5, level_decay: float = 0.8
    ) -> None:
        if tolerance < 0:
            raise ValueError(f"tolerance={tolerance}: must be >= 0 standard errors")
        self._tolerance = tolerance
        self._live = RunningLevel(share=collapse_share, decay=level_decay)
        self._holdout = RunningLevel(share=collapse_share, decay=level_decay)
        self._published: PublishedDrafter | None = None
        self._best: PublishedDrafter | None = None
        self.best_accept_length = math.nan  # accept length of the best at the last comparison
        self.num_refused = 0
        self.alarm = ""  # why the published drafter must not be used; empty: it may be used
        self._num_quiet = 0  # phases since a collapse was last seen

    @property
    def published(self) -> PublishedDrafter:
        """Return the drafter that the engines hold."""
        assert self._published is not None, "start() comes first"
        return self._published

    @property
    def best(self) -> PublishedDrafter:
        """Return the drafter that accepted most at the last comparison."""
        assert self._best is not None, "start() comes first"
        return self._best

    def start(self, weights: Mapping[str, Tensor], version: int = 0) -> PublishedDrafter:
        """Set the drafter that the engines start with."""
        self._published = self._best = _copy(weights, version)
        return self._published

    def adopt(self, weights: Mapping[str, Tensor]) -> PublishedDrafter:
        """Make `weights`, which the engines received during a rollout, the published drafter."""
        self._published = _copy(weights, self.published.version + 1)
        return self._published

    def observe_live(self, accept_length: float | None) -> bool:
        """Add the accept length of a rollout with the published drafter (None: not used). Returns whether an alarm is on.

        Call it once per phase. An alarm also ends without a publish, `_QUIET_PHASES` phases after the last collapse: only
        drafting with the drafter shows what it accepts in rollouts.
        """
        level = self._live.value
        self._num_quiet += 1
        if self.alarm and accept_length is None and self._num_quiet > _QUIET_PHASES:
            log.warning("drafter version %d is tried again", self.published.version)
            self.alarm = ""
        if accept_length is not None and self._live.observe(accept_length) and not self.alarm:
            self._raise_alarm("live", accept_length, level)
        return bool(self.alarm)

    def consider(
        self,
        candidate: Mapping[str, Tensor],
        evaluate: Callable[[Mapping[str, Tensor]], HoldoutResult],
        *,
        checksum: int | None = None,
    ) -> PublishDecision:
        """Decide on `candidate` (trainable tensors).

        `evaluate` measures given weights, always on the same slice and with the current target. It is called for the
        candidate, the published and the best drafter, once per distinct checksum. `checksum` is the candidate's
        (`checksum_weights`), if known; engines check it when they load.
        """
        published, best = self.published, self.best
        if checksum is None:
            checksum = checksum_weights(candidate)
        measured = {}
        for key, weights in (
            (checksum, candidate),
            (published.checksum, published.weights),
            (best.checksum, best.weights),
        ):
            if key not in measured:
                measured[key] = evaluate(weights)
        new = measured[checksum]
        if checksum == published.checksum:
            objection = "the candidate is what is published"
        elif not all(_is_finite(tensor) for tensor in candidate.values()):
            objection = "the candidate has weights that are not finite"
        else:
            objection = ""
        action, reason = self._choose(
            new, measured[published.checksum], measured[best.checksum], objection
        )
        if action == PublishAction.PUBLISH:
            self._published = _copy(candidate, published.version + 1, checksum)
        elif action == PublishAction.RESTORE:
            self._published = PublishedDrafter(
                weights=best.weights, version=published.version + 1, checksum=best.checksum
            )
        if action != PublishAction.PUBLISH and checksum != published.checksum:
            self.num_refused += 1
            log.info("drafter candidate refused: %s", reason)
        self._update_best(measured)
        self._watch(measured[self.published.checksum].accept_length, action)
        lengths = {
            "candidate": new.accept_length,
            "published": measured[self.published.checksum].accept_length,
            "best": self.best_accept_length,
        }
        return PublishDecision(
            action=action,
            drafter=self.published,
            reason=reason,
            is_alarmed=bool(self.alarm),
            metrics={f"drafter/holdout_accept_length/{k}": v for k, v in lengths.items()}
            | {"drafter/holdout_rows": float(new.num_rows)}
            | {"drafter/is_published": float(action != PublishAction.KEEP)}
            | self.metrics(),
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the current state."""
        return {
            "drafter/alarm": float(bool(self.alarm)),
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
            reason += f"; the published one is down to {old.accept_length:.3f}, the best is back"
            return PublishAction.RESTORE, reason
        return PublishAction.KEEP, reason

    def _is_worse(self, one: HoldoutResult, other: HoldoutResult) -> bool:
        """Return whether `one` is worse than `other` by more than the noise. NaN is always worse."""
        if math.isnan(other.accept_length):
            return math.isnan(one.accept_length)
        difference = one.accept_length - other.accept_length
        return not difference >= -self._tolerance * one.standard_error(other)

    def _update_best(self, measured: Mapping[int, HoldoutResult]) -> None:
        """Make the published drafter the best if it measures no less, or if the best was not measured (NaN)."""
        now = measured[self.published.checksum].accept_length
        kept = measured[self.best.checksum].accept_length
        if now >= kept or math.isnan(kept):
            self._best, kept = self._published, now
        self.best_accept_length = kept

    def _watch(self, accept_length: float, action: PublishAction) -> None:
        """Raise the alarm if the published drafter has collapsed. End it if a new one was published that has not."""
        is_known = not math.isnan(accept_length)
        level = self._holdout.value
        if is_known and self._holdout.observe(accept_length):
            self._num_quiet = 0
            if not self.alarm:
                self._raise_alarm("hold-out", accept_length, level)
        elif self.alarm and action != PublishAction.KEEP:
            # Without a slice, the next rollout shows whether it is good.
            log.warning("drafter version %d is good again", self.published.version)
            self.alarm = ""

    def _raise_alarm(self, where: str, accept_length: float, level: float) -> None:
        self._num_quiet = 0
        self.alarm = (
            f"the {where} accept length of drafter version {self.published.version} fell to"
            f" {accept_length:.2f} from a level of {level:.2f}"
        )
        log.warning(
            "%s: fall back to n-gram or OFF until a good one is published, or for %d phases",
            self.alarm,
            _QUIET_PHASES,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights, not copied: `published.*`, and `best.*` if the best is another drafter."""
        state = {f"published.{name}": t for name, t in self.published.weights.items()}
        if self.best.checksum != self.published.checksum:
            state |= {f"best.{name}": t for name, t in self.best.weights.items()}
        return state

    def record(self) -> dict[str, object]:
        """Return the rest of the state as JSON types."""
        return {
            "published_version": self.published.version,
            "best_version": self.best.version,
            "best_accept_length": to_json(self.best_accept_length),
            "num_refused": self.num_refused,
            "alarm": self.alarm,
            "num_quiet": self._num_quiet,
            "live_level": self._live.state_dict(),
            "holdout_level": self._holdout.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor], record: Mapping[str, object]) -> None:
        """Load the results of `state_dict` and `record`."""
        parts: dict[str, dict[str, Tensor]] = {"published": {}, "best": {}}
        for key, tensor in state.items():
            part, _, name = key.partition(".")
            if part not in parts:
                raise ValueError(f"publisher state: {key} is unknown; published.* or best.*")
            parts[part][name] = tensor
        self._published = _copy(parts["published"], int(record["published_version"]))
        self._best = self._published
        if parts["best"]:
            self._best = _copy(parts["best"], int(record["best_version"]))
        self.best_accept_length = from_json(record["best_accept_length"])
        self.num_refused = int(record["num_refused"])
        self.alarm = str(record["alarm"])
        self._num_quiet = int(record.get("num_quiet", 0))  # older checkpoints have none
        self._live.load_state_dict(record["live_level"])
        self._holdout.load_state_dict(record["holdout_level"])


def _copy(
    weights: Mapping[str, Tensor], version: int, checksum: int | None = None
) -> PublishedDrafter:
    """Copy the weights to the CPU, because the trainer changes its own in place."""
    copies = {name: t.detach().to("cpu", copy=True) for name, t in weights.items()}
    checksum = checksum_weights(copies) if checksum is None else checksum
    return PublishedDrafter(weights=copies, version=version, checksum=checksum)


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, without a mask: the extremes show both NaN and infinity."""
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def checksum_weights(weights: Mapping[str, Tensor]) -> int:
    """Return the checksum that `RolloutEngine.load_drafter_weights` checks."""
    return sum(checksum_tensor(name, t) for name, t in weights.items()) % CHECKSUM_MODULUS
