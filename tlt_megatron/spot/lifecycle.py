"""The drafter's part of an RL step: collect data, train while idle, publish at the phase boundary.

Called by the loop and the rollout worker if the run has spot training. In the order of a step:

    add_features         data: a response with its hidden states    -> drafter/data_buffer.py
    run_until_preempted  session: this rank's idle time              -> spot_trainer.py, session.py
      _measure_candidate   measurement: before the rank trains       -> holdout.py
    publish              publication: the decision of all ranks      -> publisher.py
    make_tap             data: the hidden states of the whole batch  -> mcore/hidden_tap.py
    save_into            checkpoint                                  -> drafter_checkpoint.py

The RL step pays for the time from the end of the last rollout to the end of `publish`: the stall.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tlt_megatron.config.load import check_record
from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.drafter_trainer import (
    DrafterTrainer,
    PassAbandoned,
    check_tensors,
    interruptible,
)
from tlt_megatron.drafter.eagle_folder import config_of, write_drafter
from tlt_megatron.drafter.packing import draft_sequence
from tlt_megatron.engines.base import PassRecord, RolloutEngine
from tlt_megatron.mcore.hidden_tap import HiddenStateTap
from tlt_megatron.models.hf_io import checksum_tensors, read_tensors
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.durable import new_folder, save_tensors
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.saved_files import errors_named, parse_object
from tlt_megatron.spot.drafter_checkpoint import (
    AsyncDrafterCheckpointer,
    DrafterCheckpoint,
    RecordSection,
    logging_failed_writes,
)
from tlt_megatron.spot.holdout import Comparison, Holdout
from tlt_megatron.spot.publisher import DrafterPublisher
from tlt_megatron.spot.rank_state import SpotRanks
from tlt_megatron.spot.session import StopWatch
from tlt_megatron.spot.spot_trainer import SpotReport, SpotTrainer
from tlt_megatron.types import DraftSequence, Rollout

log = logging.getLogger(__name__)

_FOLDER, _DATA_FOLDER = "drafter", "drafter_data"  # subfolders of a checkpoint


class DrafterLifecycle:
    """Manages the run's drafter on this rank: its data, sessions, publications and checkpoints."""

    def __init__(
        self,
        trainer: DrafterTrainer,
        buffer: DataBuffer,
        engine: RolloutEngine,
        holdout: Holdout,
        *,
        ranks: SpotRanks,
        world: Group,
        timeline: Timeline,
        run_dir: Path,
    ) -> None:
        """`trainer` and `engine` hold the same drafter, each its own copy."""
        self.trainer = trainer
        self.buffer = buffer
        self.engine = engine
        self.holdout = holdout
        self.world = world
        self.publisher = DrafterPublisher(self._copy_weights())
        self.spot = SpotTrainer(
            trainer,
            buffer,
            ranks=ranks,
            timeline=timeline,
            measure_candidate=self._measure_candidate,
        )
        self.checkpointer = AsyncDrafterCheckpointer(run_dir / "drafter")  # the first rank saves
        # The drafter at the last phase boundary, the same on all ranks; None: it was considered.
        self._candidate: dict[str, Tensor] | None = None
        self._candidate_updates = trainer.num_updates  # updates of the newest candidate
        # The candidate's checksum and this rank's comparison, for the decision of all ranks.
        self._measured: tuple[int, Comparison] | None = None
        self._has_features = False  # whether every rank's engine gave hidden states in this step

    # ---- data

    def start_step(self, step: int) -> None:
        """Begin RL step `step`: the data so far now belongs to earlier steps."""
        self.buffer.start_step(step)
        self.holdout.start_step()

    def add_features(self, rollout: Rollout, features: Tensor, first_position: int = 0) -> None:
        """Add a finished response, whose first token has the noise of `first_position`.

        `features` [T - 1, F] are the engine's hidden states.
        """
        hidden_size = self.trainer.model.config.hidden_size
        self._add(draft_sequence(rollout, features, hidden_size, first_position))

    def add_passes(self, passes: Sequence[PassRecord]) -> None:
        """Add the passes of this rank's engine, which say how it drafts."""
        self.holdout.add_passes(passes)

    def _add(self, sequence: DraftSequence) -> None:
        kept = self.buffer.add(sequence)
        if kept is not None:
            self.holdout.add(kept)

    def make_tap(self) -> HiddenStateTap:
        """Make the tap for the policy's first forward pass of a step.

        It gets passes of its own only if the engine gave no hidden states: sessions need the data.
        """
        return HiddenStateTap(
            on_sequence=self._add,
            max_bytes=self.buffer.max_bytes,
            hidden_size=self.trainer.model.config.hidden_size,
            aux_layer_ids=self.trainer.model.config.aux_layer_ids,
            # On a GPU the buffer's own dtype: fewer bytes cross to the host.
            dtype=self.buffer.dtype if self.trainer.device.type == "cuda" else torch.float32,
            has_own_passes=not self._has_features,
        )

    # ---- the idle time of a step

    def run_until_preempted(self, step: int, generation_round: int = 0) -> SpotReport:
        """Train the drafter until the end of the last rank's rollouts."""
        return self.spot.run_until_preempted(step, generation_round)

    def end_round(self) -> float:
        """Give all ranks the newest drafter before the next generation round of the same step.

        Returns the seconds that the round waited. A collective of all ranks.
        """
        started = time.perf_counter()
        self.spot.sync_newest(self.world)
        return time.perf_counter() - started

    def _measure_candidate(self, watch: StopWatch) -> None:
        """Measure the candidate of the last step, so that `publish` does not wait for it.

        A rank with too little idle time has no result.
        """
        candidate, trainer = self._candidate, self.trainer
        if candidate is None or self._measured is not None:  # an earlier round of the step
            return
        published = self.publisher.published.weights
        with contextlib.suppress(PassAbandoned), interruptible(trainer.model, watch):
            comparison = self.holdout.compare(trainer, candidate=candidate, published=published)
            if comparison is not None:
                on_device = ((name, t.to(trainer.device)) for name, t in candidate.items())
                self._measured = checksum_tensors(on_device), comparison

    # ---- publication

    def publish(self, metrics: dict[str, float]) -> None:
        """Give all ranks the newest drafter, and publish the last candidate if it is accepted.

        The newest drafter becomes the next candidate. Adds to the step's `metrics`. A collective,
        while the engines hold the rollouts' policy.
        """
        started = time.perf_counter()
        self.spot.sync_newest(self.world)
        metrics |= self.publisher.metrics()
        mine = (self._measured, self.buffer.has_new)
        parts, has_new = zip(*gather_objects(mine, self.world), strict=True)
        self._measured, self._has_features = None, all(has_new)
        if measured := [part for part in parts if part]:
            checksums, comparisons = zip(*measured, strict=True)
            metrics |= self._consider(checksums[0], Comparison.merge(comparisons))
        if self.trainer.num_updates != self._candidate_updates:
            self._candidate_updates = self.trainer.num_updates
            self._candidate = self._copy_weights()
        metrics["drafter/num_updates"] = float(self.trainer.num_updates)
        metrics["bubble/stall_s"] += time.perf_counter() - started

    def _copy_weights(self) -> dict[str, Tensor]:
        """Return the average of the trainer's weights, copied to the CPU."""
        average = self.trainer.average
        return {name: tensor.to("cpu", copy=True) for name, tensor in average.items()}

    def _consider(self, checksum: int, comparison: Comparison) -> dict[str, float]:
        """Publish and save the candidate, or drop it. Returns metrics."""
        assert self._candidate is not None
        is_published = self.publisher.consider(self._candidate, checksum, comparison)
        self._candidate = None
        if is_published:
            self._load_published()
            if self.world.is_first:
                self.checkpointer.save(self._checkpoint())
        candidate, published = comparison.accept_lengths
        return self.publisher.metrics() | {
            "drafter/holdout_accept_length/candidate": candidate,
            "drafter/holdout_accept_length/published": published,
            "drafter/holdout_standard_error": comparison.standard_error,
            "drafter/holdout_tokens": float(comparison.num_tokens),
            "drafter/is_published": float(is_published),
        }

    def _load_published(self) -> None:
        drafter = self.publisher.published
        self.engine.load_drafter_weights(
            drafter.weights, version=drafter.version, checksum=drafter.checksum
        )

    # ---- checkpoints

    def _checkpoint(self) -> DrafterCheckpoint:
        # A step that was stopped may have trained the drafter further.
        is_trained = self.trainer.num_updates > self._candidate_updates
        return DrafterCheckpoint(
            config=config_of(self.trainer.model),
            weights=self.publisher.published.weights,
            state=self.trainer.state_dict(),
            record={
                "publisher": self.publisher.record(),
                "has_candidate": self._candidate is not None or is_trained,
            },
        )

    def save_into(self, folder: Path) -> None:
        """Write this rank's part of an RL checkpoint: its data, and on rank 0 the drafter.

        A part that cannot be written is logged and left out; a resumed run starts it anew.
        """
        data = self.buffer.state_dict()
        path = folder / _DATA_FOLDER / f"rank_{self.world.rank:05d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        with logging_failed_writes(path):
            save_tensors(data["tensors"], path, metadata={"values": json.dumps(data["values"])})
        if self.world.is_first:
            with logging_failed_writes(folder / _FOLDER):
                self._checkpoint().write(folder / _FOLDER)

    def load_from(self, folder: Path) -> None:
        """Restore what `save_into` wrote. Without a fitting drafter, start anew with a warning.

        The data is restored only if the number of ranks is the same as when it was written.
        """
        try:
            with errors_named(folder / _FOLDER):
                saved = DrafterCheckpoint.load(folder / _FOLDER, self.trainer.model.config)
                record = check_record(RecordSection, saved.record, folder / _FOLDER)
                check_tensors(saved.weights, self.publisher.published.weights)
                self.trainer.load_state_dict(saved.state)
        except ValueError as error:
            if self.world.is_first:
                log.warning("the drafter starts anew: %s", error)
            return
        published = record.publisher
        self.publisher = DrafterPublisher(
            saved.weights, version=published.version, num_refused=published.num_refused
        )
        self._candidate_updates = self.trainer.num_updates
        self._candidate = self._copy_weights() if record.has_candidate else None
        files = sorted((folder / _DATA_FOLDER).glob("rank_*.safetensors"))
        if len(files) == self.world.size:
            self._load_data(files[self.world.rank])
        self._load_published()

    def _load_data(self, path: Path) -> None:
        """Restore the data of this rank. Without a fitting file, begin with none and a warning."""
        try:
            with errors_named(path):
                tensors = read_tensors(path)
                with safe_open(path, framework="pt") as file:
                    values = parse_object(path, file.metadata()["values"])
                self.buffer.load_state_dict({"tensors": tensors, "values": values})
        except ValueError as error:
            log.warning("rank %d: the drafter's data starts anew: %s", self.world.rank, error)

    def export(self, folder: Path) -> None:
        """Write the published drafter for SGLang and vLLM."""
        with new_folder(folder) as temporary:
            write_drafter(
                temporary, config_of(self.trainer.model), self.publisher.published.weights
            )

    def close(self) -> None:
        """Wait for the checkpoints that are still being written."""
        self.checkpointer.close()
