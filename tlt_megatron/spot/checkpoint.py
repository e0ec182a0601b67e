"""Asynchronous drafter checkpoints: `save` copies the tensors to host memory, and a thread writes the files.

The one rank that saves creates the checkpointer. A checkpoint holds the drafter's own parameters, their moments and counters,
but not the borrowed embedding and head. The folder has the layout that `checkpoint.py` and SGLang load: training can resume
from it, and SGLang can serve it. A folder without `.tmp` in its name is complete. Each is written under a temporary name,
fsynced and renamed, so a crash never damages an earlier checkpoint.

    <root>/save_0000007/   config.json, model.safetensors, training/{state.safetensors, record.json, <extra>.safetensors}
    <root>/best.txt        the name of the best checkpoint
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tlt_megatron.drafter.checkpoint import (
    TRAINER_FILE,
    WEIGHTS_FILE,
    load_trainer_state,
    save_draft_config,
)
from tlt_megatron.models.draft_model import DraftModel, fingerprint_sample, sample_embedding
from tlt_megatron.runtime.durable import replace_text, save_tensors, sync_path, sync_tree

log = logging.getLogger(__name__)

BEST_FILE = "best.txt"
_RECORD_FILE = "training/record.json"
_WEIGHT_PREFIX = "model."  # of the parameters in DrafterTrainer.state_dict()
_PREFIX = "save_"
_TARGET = "target"  # in a host copy, not written: the embedding rows for the fingerprint

Extra = Mapping[str, Mapping[str, Tensor]]  # file name -> its tensors


class DrafterNotSaved(RuntimeError):
    """A background write failed. Earlier checkpoints are intact, and the next save may succeed."""


@contextmanager
def logging_failed_saves() -> Iterator[None]:
    """Log DrafterNotSaved instead of raising it, for callers that can continue without the checkpoint."""
    try:
        yield
    except DrafterNotSaved as error:
        log.error("%s", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCheckpoint:
    """A loaded checkpoint: the arguments of `save`."""

    folder: Path
    state: dict[str, Tensor]  # for DrafterTrainer.load_state_dict
    record: dict[str, object]
    extra: dict[str, dict[str, Tensor]]


def load_checkpoint(folder: Path) -> DrafterCheckpoint:
    """Read a folder that the checkpointer wrote. ValueError if it did not write this folder."""
    if not (folder / _RECORD_FILE).is_file():
        raise ValueError(f"{folder}: must be a folder with {_RECORD_FILE}")
    state = load_trainer_state(folder)
    assert state is not None, folder
    files = sorted((folder / TRAINER_FILE).parent.glob("*.safetensors"))
    extra = {file.stem: load_file(file) for file in files if file != folder / TRAINER_FILE}
    record = json.loads((folder / _RECORD_FILE).read_text(encoding="utf-8"))
    return DrafterCheckpoint(folder=folder, state=state, record=record, extra=extra)


def find_newest(root: Path) -> Path | None:
    """Return the newest checkpoint under `root`, or None."""
    return max(_saved(root), default=None)


def find_best(root: Path) -> Path | None:
    """Return the checkpoint that was last saved with `is_best`, or None."""
    pointer = root / BEST_FILE
    return root / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None


def _saved(root: Path) -> list[Path]:
    return [path for path in root.glob(f"{_PREFIX}*") if path.suffix != ".tmp"]


class _HostCopy:
    """Host copies of tensors, by file. Later snapshots of the same shapes reuse the memory."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Tensor]] = {}
        self._event: torch.Event | None = None

    def fill(self, sources: Extra) -> None:
        """Copy `sources` to the host. Copies from a GPU are asynchronous, on its current stream; see `wait`."""
        self._event = None
        for file, tensors in sources.items():
            old = self.files.get(file, {})
            self.files[file] = {name: _room_for(t, old.get(name)) for name, t in tensors.items()}
            targets = list(self.files[file].values())
            with torch.no_grad():
                torch._foreach_copy_(targets, list(tensors.values()), non_blocking=True)
        self.files = {file: self.files[file] for file in sources}
        devices = {tensor.device for tensors in sources.values() for tensor in tensors.values()}
        for device in devices - {torch.device("cpu")}:
            self._event = torch.Event(device)
            self._event.record()

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._event is not None:
            self._event.synchronize()


def _room_for(tensor: Tensor, old: Tensor | None) -> Tensor:
    if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
        return old
    is_pinned = tensor.device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    copy: _HostCopy
    record: str  # JSON
    folder: Path | None  # None: the next numbered folder under the root
    is_best: bool


class AsyncDrafterCheckpointer:
    """Saves one drafter under `root` from a background thread. The next call raises DrafterNotSaved if a write failed.

    Keeps the `keep` newest checkpoints and the best one. A newer save replaces a save that has not started, which counts
    in `num_superseded`. Only a newer best save replaces a waiting best save.
    """

    def __init__(self, root: Path, model: DraftModel, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: must be >= 1 checkpoints")
        self.root = root
        self.num_written = 0
        self.num_superseded = 0
        self.blocking_s = 0.0  # spent in calls of save and snapshot_into
        self.writing_s = 0.0  # spent by the thread
        self._model = model
        self._names = frozenset(model.state_dict())
        self._keep = keep
        self._condition = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._free: list[_HostCopy] = []
        self._is_writing = False
        self._is_closing = False
        self._error: tuple[Path, Exception] | None = None
        self._thread: threading.Thread | None = None
        root.mkdir(parents=True, exist_ok=True)
        for unfinished in root.glob("*.tmp"):
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
        newest = find_newest(root)
        self._next = int(newest.name.removeprefix(_PREFIX)) + 1 if newest else 0

    def save(
        self,
        state: Mapping[str, Tensor],
        record: Mapping[str, object],
        *,
        extra: Extra | None = None,
        is_best: bool = False,
    ) -> None:
        """Snapshot `DrafterTrainer.state_dict()` with a JSON-able `record`, and return; the thread writes it.

        Each entry of `extra` becomes one more file, e.g. {"publisher": publisher.state_dict()}.
        """
        started = time.perf_counter()
        with self._condition:
            superseded = [
                job for job in self._waiting if job.folder is None and (is_best or not job.is_best)
            ]
            for job in superseded:
                self._waiting.remove(job)
                self._free.append(job.copy)
            self.num_superseded += len(superseded)
        self._submit(state, record, extra or {}, folder=None, is_best=is_best)
        self.blocking_s += time.perf_counter() - started

    def snapshot_into(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        record: Mapping[str, object],
        *,
        extra: Extra | None = None,
    ) -> None:
        """Save to `folder`, which must not exist, as a part of a larger checkpoint.

        Later saves do not replace it. Call `wait` before you declare the larger checkpoint complete.
        """
        started = time.perf_counter()
        self._submit(state, record, extra or {}, folder=folder, is_best=False)
        self.blocking_s += time.perf_counter() - started

    def wait(self) -> None:
        """Wait until every requested save is on disk."""
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting and not self._is_writing)
        self._raise_error()

    def close(self) -> None:
        """Finish the waiting saves and end the thread."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._raise_error()

    def _submit(
        self,
        state: Mapping[str, Tensor],
        record: Mapping[str, object],
        extra: Extra,
        *,
        folder: Path | None,
        is_best: bool,
    ) -> None:
        self._raise_error()
        text = json.dumps(record)
        if self._is_closing:
            raise RuntimeError(f"the checkpointer of {self.root} is closed")
        weights = {
            name.removeprefix(_WEIGHT_PREFIX): tensor
            for name, tensor in state.items()
            if name.startswith(_WEIGHT_PREFIX)
        }
        if weights.keys() != self._names:
            wrong = ", ".join(sorted(weights.keys() ^ self._names)[:5])
            raise ValueError(
                f"drafter state: {wrong}: must hold exactly the drafter's own parameters"
            )
        rest = {name: t for name, t in state.items() if not name.startswith(_WEIGHT_PREFIX)}
        files = {WEIGHTS_FILE: weights, TRAINER_FILE: rest}
        files |= {f"training/{name}.safetensors": tensors for name, tensors in extra.items()}
        # Sampled here, not in the thread: an engine that goes to sleep frees the borrowed embedding.
        files[_TARGET] = {"rows": sample_embedding(self._model.embedding_VD)}
        with self._condition:
            copy = self._free.pop() if self._free else _HostCopy()
        copy.fill(files)
        job = _Job(copy=copy, record=text, folder=folder, is_best=is_best)
        with self._condition:
            self._waiting.append(job)
            self._condition.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="drafter-checkpoint", daemon=True
            )
            self._thread.start()

    def _raise_error(self) -> None:
        with self._condition:
            error, self._error = self._error, None
        if error is not None:
            folder, cause = error
            raise DrafterNotSaved(
                f"the drafter's checkpoint {folder} was not written: {cause}"
            ) from cause

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._is_writing = True
            folder = job.folder or self.root / f"{_PREFIX}{self._next:07d}"
            self._next += job.folder is None
            temporary = folder.with_name(folder.name + ".tmp")
            started, error = time.perf_counter(), None
            try:
                self._write(job, temporary, folder)
            except Exception as cause:  # of any type: _raise_error gives it to the caller
                error = (folder, cause)
                log.exception("drafter checkpoint %s could not be written", folder)
                shutil.rmtree(temporary, ignore_errors=True)  # frees the space if the disk is full
            with self._condition:
                self.writing_s += time.perf_counter() - started
                self.num_written += error is None
                self._error = self._error or error
                self._free.append(job.copy)
                self._is_writing = False
                self._condition.notify_all()

    def _write(self, job: _Job, temporary: Path, folder: Path) -> None:
        (temporary / TRAINER_FILE).parent.mkdir(parents=True)
        job.copy.wait()
        files = dict(job.copy.files)
        rows_ND = files.pop(_TARGET)["rows"]
        for file, tensors in files.items():
            save_tensors(tensors, temporary / file, metadata={"format": "pt"})
        (temporary / _RECORD_FILE).write_text(job.record, encoding="utf-8")
        config = self._model.config
        target = fingerprint_sample(rows_ND, config.vocab_size)
        save_draft_config(temporary, config, target, self._model.fc.weight.dtype)
        sync_tree(temporary)
        temporary.rename(folder)
        sync_path(folder.parent)
        if job.folder is None:
            if job.is_best:
                replace_text(self.root / BEST_FILE, folder.name)
            self._drop_old()

    def _drop_old(self) -> None:
        best = find_best(self.root)
        for folder in sorted(_saved(self.root))[: -self._keep]:
            if folder != best:
                # Rename first: a partly deleted folder must not look complete.
                shutil.rmtree(folder.rename(folder.with_name(folder.name + ".tmp")))
