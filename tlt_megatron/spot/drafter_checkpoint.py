"""Checkpoints of the drafter: what the engines draft with, and what its training continues from.

A folder is written under a temporary name, flushed and renamed, so a crash leaves none
half-written.

    config.json, model.safetensors    the published drafter, as eagle_folder.py and SGLang load it
    training/state.safetensors        the trainer's weights, moments and counters
    training/record.json              the rest
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt_megatron.config.ranges import Count, Section
from tlt_megatron.drafter.eagle_folder import WEIGHTS_FILE, load_trainer_state, write_drafter
from tlt_megatron.models.draft_model import DraftConfig
from tlt_megatron.models.hf_io import read_tensors
from tlt_megatron.runtime.device import HostCopies
from tlt_megatron.runtime.durable import new_folder
from tlt_megatron.runtime.log import FILE_ONLY
from tlt_megatron.saved_files import read_json

log = logging.getLogger(__name__)

_RECORD_FILE = "training/record.json"


@contextmanager
def logging_failed_writes(path: Path) -> Iterator[None]:
    """Log a failed write of `path` instead of raising it, and remove the file."""
    try:
        yield
    except OSError as error:
        log.error("drafter: %s was not written; the run continues without it: %s", path, error)
        log.info("the failed write", exc_info=error, extra=FILE_ONLY)
        if path.is_file():
            path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSection(Section):
    """The state of `spot.publisher.DrafterPublisher` except the weights."""

    version: Count
    num_refused: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSection(Section):
    """What training/record.json must hold: see `spot.lifecycle`."""

    publisher: PublisherSection
    has_candidate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCheckpoint:
    """The content of a folder."""

    config: DraftConfig  # with the fingerprint of the target
    weights: Mapping[str, Tensor]  # the published drafter's
    state: Mapping[str, Tensor]  # DrafterTrainer.state_dict()
    record: Mapping[str, Any]  # JSON-able

    def write(self, folder: Path) -> None:
        """Write `folder`, or replace it. OSError if that fails; then nothing is left of the new
        one.
        """
        with new_folder(folder) as temporary:
            write_drafter(temporary, self.config, self.weights, self.state)
            (temporary / _RECORD_FILE).write_text(json.dumps(self.record), encoding="utf-8")

    @staticmethod
    def load(folder: Path, config: DraftConfig) -> DrafterCheckpoint:
        """Read a folder of `write` for the run's drafter of `config`. ValueError for any other
        folder, and for weights that are not finite.
        """
        state = load_trainer_state(folder)
        if state is None or not (folder / _RECORD_FILE).is_file():
            raise ValueError(f"{folder}: must be a folder with {_RECORD_FILE}")
        weights = read_tensors(folder / WEIGHTS_FILE)
        broken = [n for n, t in [*weights.items(), *state.items()] if not t.isfinite().all()]
        broken += [name for name, tensor in state.items() if name.startswith("num_") and tensor < 0]
        if broken:
            raise ValueError(f"{folder}: not finite, or negative: {', '.join(broken[:3])}")
        return DrafterCheckpoint(
            config=config,
            weights=weights,
            state=state,
            record=read_json(folder / _RECORD_FILE),
        )


class AsyncDrafterCheckpointer:
    """Writes the newest checkpoint of a drafter to `folder` from a background thread.

    A save replaces an earlier one that has not started. A failed write is logged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter-checkpoint")
        self._saves: list[Future[None]] = []  # saves that are not known to be done

    def save(self, checkpoint: DrafterCheckpoint) -> None:
        """Copy the trainer's state, which changes in place, to the host. The thread does the
        rest.
        """
        for save in self._saves:
            if not save.cancel() and save.done():
                save.result()  # raises what is not a failed write
        self._saves = [save for save in self._saves if not save.done()]
        copies = HostCopies()
        host = {n: copies.add(t) if t.is_cuda else t.clone() for n, t in checkpoint.state.items()}
        self._saves.append(
            self._thread.submit(self._write, replace(checkpoint, state=host), copies)
        )

    def wait(self) -> None:
        """Wait until every requested save is written, has failed or was replaced."""
        for save in self._saves:
            save.result()
        self._saves.clear()

    def close(self) -> None:
        """Finish the requested saves and end the thread."""
        self._thread.shutdown()
        self.wait()

    def _write(self, checkpoint: DrafterCheckpoint, copies: HostCopies) -> None:
        copies.wait()
        with logging_failed_writes(self.folder):
            checkpoint.write(self.folder)
