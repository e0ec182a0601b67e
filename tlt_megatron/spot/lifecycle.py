"""The drafter's part of an RL step: collect data as responses finish, train while idle, publish at the phase boundary.

Called by the loop and the rollout worker if the run has spot training. A rank enters `run_until_preempted` when its rollouts
finish, and leaves when the last rank's rollouts finish. The RL step pays only for the time from then to the end of `publish`,
which is measured as stall.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlt_megatron.drafter.checkpoint import save_drafter
from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.interruption import PassAbandoned, interruptible
from tlt_megatron.drafter.packing import DraftBatch, DraftSequence
from tlt_megatron.drafter.trainer import DrafterTrainer
from tlt_megatron.engines.base import RolloutEngine
from tlt_megatron.mcore.hidden_tap import HiddenStateTap, TappedSequence
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.durable import save_tensors
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.spot.checkpoint import (
    AsyncDrafterCheckpointer,
    load_checkpoint,
    logging_failed_saves,
)
from tlt_megatron.spot.holdout import HoldoutResult, measure_holdout
from tlt_megatron.spot.live_channel import LiveChannel, LiveOffer
from tlt_megatron.spot.publisher import DrafterPublisher, PublishAction, checksum_weights
from tlt_megatron.spot.session import StopWatch
from tlt_megatron.spot.spot_trainer import SpotReport, SpotTrainer
from tlt_megatron.types import Rollout

log = logging.getLogger(__name__)

_HOLDOUT_BATCH_TOKENS = 128  # small: the standard error is estimated from many batches
_HOLDOUT_ROWS = 512  # per rank: enough to compare drafters, and fast enough not to delay a step
_TELLING_SHARE = 0.05  # least share of tokens from the drafter for a reliable accept length
_LIVE_EVERY = 16  # updates between two checks whether to offer a drafter during a rollout
_UNREAD = -1  # instead of an offer's number: this rank cannot read the newest offer
_FOLDER, _DATA_FOLDER = "drafter", "drafter_data"  # subfolders of a checkpoint


class BufferSource:
    """Batches of a DataBuffer on the drafter's device. Implements `spot.session.BatchSource`."""

    def __init__(self, buffer: DataBuffer, batch_tokens: int, device: torch.device) -> None:
        self._buffer = buffer
        self._batch_tokens = batch_tokens
        self._device = device

    def next_batch(self) -> DraftBatch | None:
        """Return the next batch, or None if there is no data."""
        batch = self._buffer.next_batch(self._batch_tokens)
        return None if batch is None else batch.to(self._device)

    def put_back(self) -> None:
        """Undo the last `next_batch`."""
        self._buffer.put_back()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotShare:
    """The part of one rank's SpotReport that enters the metrics of a step."""

    idle_s: float
    used_s: float
    stall_s: float
    preempt_ms: float
    num_epochs: int
    num_broken: int
    num_updates: int
    losses: tuple[float, ...]
    accept_lengths: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """Hold-out results that an idle rank measured, for the decision that all ranks make later."""

    results: dict[str, HoldoutResult]  # by key of `_contenders`
    checksum: int  # of the candidate


class DrafterLifecycle:
    """Manages the run's drafter on this rank: its data, sessions, publishing and checkpoints."""

    def __init__(
        self,
        *,
        trainer: DrafterTrainer,
        buffer: DataBuffer,
        spot: SpotTrainer,
        publisher: DrafterPublisher,
        checkpointer: AsyncDrafterCheckpointer | None,
        engine: RolloutEngine,
        tap_layers: tuple[int, ...],
        tap_bytes: int,
        world: Group,
        device: torch.device,
        live: LiveChannel | None = None,
    ) -> None:
        """Only rank 0 gets a `checkpointer`. `publisher` starts from the weights that `trainer` and engine hold.

        With `live`, drafters also reach engines that are still decoding.
        """
        self.trainer = trainer
        self.buffer = buffer
        self.spot = spot
        self.publisher = publisher
        self.checkpointer = checkpointer
        self.engine = engine
        self.world = world
        self.device = device
        self._hidden_size = trainer.model.config.hidden_size
        self._tap_layers = tap_layers
        self._tap_bytes = tap_bytes
        self._num_considered = trainer.num_updates
        # The drafter at the last phase boundary: the same on every rank.
        self._candidate: Mapping[str, Tensor] = publisher.start(trainer.model.state_dict()).weights
        self._findings: _Findings | None = None
        spot.on_idle = self._measure_idle
        self._live = live
        self._live_weights: dict[str, Tensor] | None = None  # newest offer of this step
        self._live_held = 0  # number of the offer that the engine received in this step
        if live is not None:
            spot.after_update = self._offer_live

    # ---- data

    def start_step(self, step: int) -> None:
        """Begin RL step `step`: the data so far now belongs to earlier steps."""
        self.buffer.start_step(step)

    def add_features(self, rollout: Rollout, features: Tensor) -> None:
        """Add a finished response. `features` [T - 1, F] are the engine's hidden states."""
        sequence = DraftSequence.of_rollout(rollout, features, self._hidden_size)
        self.buffer.add(sequence, self.buffer.step)

    def make_tap(self) -> HiddenStateTap:
        """Make the tap for the policy's first forward pass of a step. It shares the batch among all ranks, longest first."""

        def add(tapped: TappedSequence) -> None:
            sequence = DraftSequence(
                token_ids=tapped.token_ids,
                features=tapped.features,
                final_hidden=tapped.final_hidden,
                loss_start=tapped.prompt_length,
            )
            self.buffer.add(sequence, self.buffer.step)

        return HiddenStateTap(
            on_sequence=add, max_bytes=self._tap_bytes, aux_layer_ids=self._tap_layers
        )

    # ---- the idle time of a step, and its end

    def run_until_preempted(self, step: int) -> SpotShare:
        """Train the drafter from the end of this rank's rollouts until the end of the last rank's."""
        return _share_of(self.spot.run_until_preempted(step))

    def _offer_live(self, watch: StopWatch) -> None:
        """Offer the current drafter if it accepts more than the last offer, or the published one. Runs on the leader."""
        assert self._live is not None
        if self.trainer.num_updates % _LIVE_EVERY:
            return
        batches = self._holdout(has_new=False)
        candidate = self.trainer.model.state_dict()
        known = self._live_weights or self.publisher.published.weights
        try:
            new, old = (self._measure(w, batches, watch) for w in (candidate, known))
        except PassAbandoned:
            return  # no rank decodes any more
        if new.accept_length > old.accept_length:
            weights = self._own_weights()
            if self._live.offer(weights):
                self._live_weights = weights

    def take_live(self) -> None:
        """Load the newest offer into the engine, if there is one. Called between two decode passes."""
        self._load_live(self._live.poll() if self._live is not None else None)

    def _load_live(self, offer: LiveOffer | None) -> None:
        if offer is not None:
            self._live_held, self._live_weights = offer.number, offer.weights
            self.engine.load_drafter_weights(
                offer.weights,
                version=self.publisher.published.version + 1,
                checksum=offer.checksum,
            )

    def _settle_live(self) -> bool:
        """Make the newest offer of the step the published drafter on all ranks. A collective of all ranks.

        Returns False without an offer. Also False if a rank cannot read it: then all ranks return to the published drafter.
        """
        if self._live is None:
            return False
        self._load_live(self._live.take())
        newest = 0 if not self._live.has_unread() else _UNREAD
        held = gather_objects(newest or self._live_held, self.world)
        weights, own = self._live_weights, self._live_held
        self._live_weights, self._live_held = None, 0
        if not any(held):
            return False
        late = [rank for rank, number in enumerate(held) if number <= 0 or number != max(held)]
        if not late:
            assert weights is not None
            self.publisher.adopt(weights)
            return True
        self._live.skip(f"ranks {late} cannot read it")
        if own:
            self._hand_over()
        return False

    def _holdout(self, *, has_new: bool) -> list[DraftBatch]:
        batches = self.buffer.holdout_batches(
            _HOLDOUT_BATCH_TOKENS, has_new=has_new, max_rows=_HOLDOUT_ROWS
        )
        return [batch.to(self.device) for batch in batches]

    def publish(self, metrics: dict[str, float]) -> None:
        """Give all ranks the newest drafter, and publish the candidate of the last step if the publisher accepts it.

        The newest drafter becomes the next candidate. Idle ranks measure it in the next step, so no rank waits for that.
        Reads the live accept length from the step's `metrics` and adds its own. A collective of all ranks, while the engines
        hold the policy of the rollouts.
        """
        started = time.perf_counter()
        is_telling = metrics.get("drafter/live_token_share", 0.0) >= _TELLING_SHARE
        self.publisher.observe_live(metrics["drafter/live_accept_length"] if is_telling else None)
        self.spot.sync_newest(self.world)
        was_offered = self._settle_live()  # then there is no second comparison
        metrics |= self.publisher.metrics()
        findings = [part for part in gather_objects(self._findings, self.world) if part]
        if findings and not was_offered:
            decision = self.publisher.consider(
                self._candidate,
                lambda weights: self._merge(weights, findings),
                checksum=findings[0].checksum,
            )
            metrics |= decision.metrics
            if decision.action != PublishAction.KEEP:
                self._hand_over()
            if self.checkpointer is not None:
                self._save(is_best=decision.action == PublishAction.PUBLISH)
        self._findings = None
        if self.trainer.num_updates != self._num_considered:
            self._num_considered = self.trainer.num_updates
            self._candidate = self._own_weights()
        self.engine.suspend_drafter(bool(self.publisher.alarm))
        metrics["drafter/num_updates"] = float(self.trainer.num_updates)
        metrics["bubble/stall_s"] += time.perf_counter() - started

    def _contenders(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the weights that the publisher will compare."""
        return {
            "candidate": self._candidate,
            "published": self.publisher.published.weights,
            "best": self.publisher.best.weights,
        }

    def _measure_idle(self, watch: StopWatch) -> None:
        """Measure the candidate of the last step before this rank trains, so that `publish` does not wait for it.

        A rank with too little idle time has no result. If no rank has one, the next candidate is measured instead.
        """
        if self.publisher.published.weights is self._candidate:
            return
        batches, by_weights = self._holdout(has_new=True), {}
        try:
            for weights in self._contenders().values():
                if id(weights) not in by_weights:
                    by_weights[id(weights)] = self._measure(weights, batches, watch)
        except PassAbandoned:
            return
        self._findings = _Findings(
            results={name: by_weights[id(w)] for name, w in self._contenders().items()},
            checksum=checksum_weights(self._candidate),
        )

    def _measure(
        self, weights: Mapping[str, Tensor], batches: Sequence[DraftBatch], watch: StopWatch
    ) -> HoldoutResult:
        """Measure `weights` on the hold-out `batches`. Raises PassAbandoned once the last rollout has ended."""
        with interruptible(self.trainer.model, watch):
            return measure_holdout(self.trainer, weights, batches)

    def _merge(self, weights: Mapping[str, Tensor], findings: Sequence[_Findings]) -> HoldoutResult:
        """Merge the results for `weights` of all ranks that measured."""
        name = next(name for name, w in self._contenders().items() if w is weights)
        return HoldoutResult.merge(part.results[name] for part in findings)

    def _own_weights(self) -> dict[str, Tensor]:
        state = self.trainer.model.state_dict()
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}

    def _hand_over(self) -> None:
        drafter = self.publisher.published
        self.engine.load_drafter_weights(
            drafter.weights, version=drafter.version, checksum=drafter.checksum
        )

    # ---- checkpoints

    def _save(self, *, is_best: bool) -> None:
        assert self.checkpointer is not None
        with logging_failed_saves():
            self.checkpointer.save(self.trainer.state_dict(), self._record(), is_best=is_best)

    def _record(self) -> dict[str, object]:
        return {"publisher": self.publisher.record(), "num_considered": self._num_considered}

    def save_into(self, folder: Path) -> None:
        """Write this rank's part of an RL checkpoint: its data, and on rank 0 the drafter.

        A part that cannot be written is logged and left out; a resumed run starts it anew.
        """
        data = self.buffer.state_dict()
        path = folder / _DATA_FOLDER / f"rank_{self.world.rank:05d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        try:
            save_tensors(data["tensors"], path, metadata={"values": json.dumps(data["values"])})
        except (OSError, SafetensorError):
            log.exception("the drafter's data were not written to %s", path)
            path.unlink(missing_ok=True)
        if self.checkpointer is not None:
            with logging_failed_saves():
                self.checkpointer.wait()  # reports failures of earlier saves separately
            with logging_failed_saves():
                self.checkpointer.snapshot_into(
                    folder / _FOLDER,
                    self.trainer.state_dict(),
                    self._record(),
                    extra={"publisher": self.publisher.state_dict()},
                )
                self.checkpointer.wait()

    def load_from(self, folder: Path) -> None:
        """Restore what `save_into` wrote. Without a fitting drafter in the folder, start anew with a warning.

        The data is restored only if the number of ranks is the same as when it was written.
        """
        try:
            saved = load_checkpoint(folder / _FOLDER)
            self.trainer.load_state_dict(saved.state)
        except ValueError as error:
            if self.world.is_first:
                log.warning("the drafter starts anew: %s", error)
            return
        self.publisher.load_state_dict(saved.extra["publisher"], saved.record["publisher"])
        self._num_considered = int(saved.record["num_considered"])
        self._candidate = self._own_weights()
        files = sorted((folder / _DATA_FOLDER).glob("rank_*.safetensors"))
        if len(files) == self.world.size:
            with safe_open(files[self.world.rank], framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                values = json.loads(file.metadata()["values"])
            self.buffer.load_state_dict({"tensors": tensors, "values": values})
        self._hand_over()
        self.engine.suspend_drafter(bool(self.publisher.alarm))

    def export(self, folder: Path) -> None:
        """Write the published drafter as SGLang and vLLM load it. Overwrites this rank's training weights."""
        self.trainer.model.load_state_dict(self.publisher.published.weights)
        save_drafter(folder, self.trainer.model)

    def close(self) -> None:
        """Wait for the checkpoints that are still being written."""
        if self.checkpointer is not None:
            with logging_failed_saves():
                self.checkpointer.close()


def _share_of(report: SpotReport) -> SpotShare:
    return SpotShare(
        idle_s=report.idle_s,
        used_s=report.used_s,
        stall_s=report.stall_s,
        preempt_ms=report.preempt_ms,
        num_epochs=report.num_epochs,
        num_broken=report.num_broken,
        num_updates=report.num_updates,
        losses=report.losses,
        accept_lengths=report.accept_lengths,
    )


def spot_metrics(shares: list[SpotShare]) -> dict[str, float]:
    """Combine the shares of all ranks. An update counts once, although every member of its session made it."""
    most = max(shares, key=lambda share: share.num_updates)
    metrics = {
        "bubble/idle_s": sum(share.idle_s for share in shares),
        "bubble/used_s": sum(share.used_s for share in shares),
        "bubble/stall_s": max(share.stall_s for share in shares),
        "spot/epochs": float(max(share.num_epochs for share in shares)),
        "spot/broken": float(max(share.num_broken for share in shares)),
        "spot/updates": float(most.num_updates),
        "spot/preempt_ms": max(share.preempt_ms for share in shares),
    }
    if most.losses:
        metrics["drafter/loss"] = sum(most.losses) / len(most.losses)
        metrics["drafter/accept_length"] = sum(most.accept_lengths) / len(most.accept_lengths)
    return metrics
