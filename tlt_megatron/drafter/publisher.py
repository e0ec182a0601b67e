"""Which drafter the engines get: a candidate is published where it accepts no less than the best so far, which is kept.

Called by the trainer after a session. No ranks, no engine: the same inputs give the same decision, so every rank may decide
for itself on statistics that were merged over all (`HoldoutResult.merge`). The one thing to know: the target moves under
every drafter, so a number of an earlier target says nothing. Candidate, published and best are all measured anew, on the
same held-out batches, by the target of now.

The noise of a comparison. All are given the same rows, and what is summed is the expected overlap of distributions, not a
draw, so what is left is the choice of the slice: the standard error of the difference, by leaving out one batch at a time
(jackknife). A candidate is refused where it is worse than the best by more than `tolerance` standard errors (default 1): an
equally good one is then refused in 16 % of cases, and one that is worse by 2 standard errors published in as many (with many
batches; of a few the standard error itself is a guess). As the
bar is the best and not the last one published, such slips do not add up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from tlt_megatron.drafter.collapse import RunningLevel, from_json, to_json
from tlt_megatron.drafter.holdout import HoldoutResult
from tlt_megatron.models.hf_io import CHECKSUM_MODULUS, checksum_tensor

log = logging.getLogger(__name__)

_QUIET_PHASES = (
    3  # without a sign of collapse, after which a drafter that was given up is tried again
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDrafter:
    """Weights as the engines get them."""

    weights: dict[str, Tensor]  # trainable tensors under their own names, on the CPU
    version: int
    checksum: int


class PublishAction(StrEnum):
    """What becomes of the engines' drafter."""

    PUBLISH = "publish"  # the candidate
    RESTORE = "restore"  # the best so far, which the published one has fallen behind
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishDecision:
    """The engines get `drafter`, unless the action is KEEP: then they have it."""

    action: PublishAction
    drafter: PublishedDrafter
    reason: str
    is_alarmed: bool  # speculate by n-gram or not at all until this is False again
    metrics: dict[str, float]


class DrafterPublisher:
    """Holds the published drafter and the best, decides, and watches for a collapse.

    Order of calls: `start`, then `observe_live` after each rollout that used the published drafter, and `consider` at
    each phase boundary (or during a rollout, with `spot.publish=live`).
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
        self.best_accept_length = math.nan  # of the best, at the last comparison
        self.num_refused = 0
        self.alarm = ""  # why the published drafter must not be used; empty: it may
        self._num_quiet = 0  # phases since a collapse was last seen

    @property
    def published(self) -> PublishedDrafter:
        """What the engines have."""
        assert self._published is not None, "start() comes first"
        return self._published

    @property
    def best(self) -> PublishedDrafter:
        """What accepted most at the last comparison."""
        assert self._best is not None, "start() comes first"
        return self._best

    def start(self, weights: Mapping[str, Tensor], version: int = 0) -> PublishedDrafter:
        """Take the drafter that the engines begin with."""
        self._published = self._best = _copy(weights, version)
        return self._published

    def adopt(self, weights: Mapping[str, Tensor]) -> PublishedDrafter:
        """What the engines have been given in the middle of a rollout is the published drafter from now on."""
        self._published = _copy(weights, self.published.version + 1)
        return self._published

    def observe_live(self, accept_length: float | None) -> bool:
        """The accept length of a rollout with the published drafter; None: it was not used. Returns `is alarmed`.

        Called once per phase. An alarm also ends without a publication, `_QUIET_PHASES` phases after the last collapse that
        was seen: what the drafter accepts on rollouts is only known by drafting with it.
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
        """Decide on `candidate` (trainable tensors). `evaluate` measures any weights on one and the same slice, by the
        target of now; it is called for candidate, published and best, as far as they differ. `checksum` is the
        candidate's (`checksum_weights`), where it is known already; engines check it when they load."""
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
        """Of the state, at any time."""
        return {
            "drafter/alarm": float(bool(self.alarm)),
            "drafter/version": float(self.published.version),
            "drafter/num_refused": float(self.num_refused),
        }

    def _choose(
        self, new: HoldoutResult, old: HoldoutResult, best: HoldoutResult, objection: str
    ) -> tuple[PublishAction, str]:
        if not objection and not new.num_rows:
            # No hold-out is asked for, or the buffer is still empty: training goes on unguarded.
            return PublishAction.PUBLISH, "not compared: the held-out slice is empty"
        if not objection and not self._is_worse(new, best):
            return PublishAction.PUBLISH, f"accepts {new.accept_length:.3f}"
        reason = objection or f"accepts {new.accept_length:.3f}, the best {best.accept_length:.3f}"
        if new.num_rows and self._is_worse(old, best):
            reason += f"; the published one is down to {old.accept_length:.3f}, the best is back"
            return PublishAction.RESTORE, reason
        return PublishAction.KEEP, reason

    def _is_worse(self, one: HoldoutResult, other: HoldoutResult) -> bool:
        """By more than the noise; what is not a number is worse than what is one."""
        if math.isnan(other.accept_length):
            return math.isnan(one.accept_length)
        difference = one.accept_length - other.accept_length
        return not difference >= -self._tolerance * one.standard_error(other)

    def _update_best(self, measured: Mapping[int, HoldoutResult]) -> None:
        """The published drafter is the best where it measures no less, or where nothing is known of either."""
        now = measured[self.published.checksum].accept_length
        kept = measured[self.best.checksum].accept_length
        if now >= kept or math.isnan(kept):
            self._best, kept = self._published, now
        self.best_accept_length = kept

    def _watch(self, accept_length: float, action: PublishAction) -> None:
        """Alarm where the published drafter has collapsed; the end of it where one that has not was published."""
        is_known = not math.isnan(accept_length)
        level = self._holdout.value
        if is_known and self._holdout.observe(accept_length):
            self._num_quiet = 0
            if not self.alarm:
                self._raise_alarm("hold-out", accept_length, level)
        elif self.alarm and action != PublishAction.KEEP:
            # Without a slice it is the next rollout that judges.
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
        """The weights held, as live tensors: `published.*`, and `best.*` where that is another."""
        state = {f"published.{name}": t for name, t in self.published.weights.items()}
        if self.best.checksum != self.published.checksum:
            state |= {f"best.{name}": t for name, t in self.best.weights.items()}
        return state

    def record(self) -> dict[str, object]:
        """All else, as JSON holds it."""
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
        """Take over what `state_dict` and `record` gave."""
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
    """A copy on the CPU: the trainer goes on writing into its own."""
    copies = {name: t.detach().to("cpu", copy=True) for name, t in weights.items()}
    checksum = checksum_weights(copies) if checksum is None else checksum
    return PublishedDrafter(weights=copies, version=version, checksum=checksum)


def _is_finite(tensor: Tensor) -> bool:
    """Read once, without a mask: nan and inf both show in the extremes."""
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def checksum_weights(weights: Mapping[str, Tensor]) -> int:
    """As `RolloutEngine.load_drafter_weights` wants it."""
    return sum(checksum_tensor(name, t) for name, t in weights.items()) % CHECKSUM_MODULUS
