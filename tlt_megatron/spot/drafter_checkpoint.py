"""Checkpoints of the drafter: its parameters, moments and counters; nothing that it borrows.

A folder has the layout that drafter/eagle_folder.py and SGLang load. It is written under a temporary
name, fsynced and renamed, so a folder without `.tmp` in its name is complete after any crash.

    <root>/save_0000007/   config.json, model.safetensors,
                           training/{state.safetensors, record.json, <extra>.safetensors}
    <root>/best.txt        the name of the best checkpoint
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tlt_megatron.drafter.eagle_folder import (
    TRAINER_FILE,
    WEIGHTS_FILE,
    load_trainer_state,
    save_draft_config,
)
from tlt_megatron.models.draft_model import DraftModel, TargetFingerprint, fingerprint_target
from tlt_megatron.runtime.device import HostCopies
from tlt_megatron.runtime.durable import new_folder, replace_text, save_tensors
from tlt_megatron.runtime.log import FILE_ONLY

log = logging.getLogger(__name__)

BEST_FILE = "best.txt"
_RECORD_FILE = "training/record.json"
_WEIGHT_PREFIX = "model."  # of the parameters in DrafterTrainer.state_dict()
_PREFIX = "save_"


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
class DrafterCheckpoint:
    """A loaded checkpoint: the arguments of `write_checkpoint`."""

    state: dict[str, Tensor]  # for DrafterTrainer.load_state_dict
    record: dict[str, Any]  # decoded JSON
    extra: dict[str, dict[str, Tensor]]


def load_checkpoint(folder: Path) -> DrafterCheckpoint:
    """Read a folder of `write_checkpoint`. ValueError for any other folder."""
    if not (folder / _RECORD_FILE).is_file():
        raise ValueError(f"{folder}: must be a folder with {_RECORD_FILE}")
    state = load_trainer_state(folder)
    assert state is not None, folder
    files = (folder / TRAINER_FILE).parent.glob("*.safetensors")
    extra = {file.stem: load_file(file) for file in files if file != folder / TRAINER_FILE}
    record = json.loads((folder / _RECORD_FILE).read_text(encoding="utf-8"))
    return DrafterCheckpoint(state=state, record=record, extra=extra)


def write_checkpoint(
    folder: Path,
    model: DraftModel,
    state: Mapping[str, Tensor],
    record: Mapping[str, object],
    *,
    target: TargetFingerprint,
    extra: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Write `DrafterTrainer.state_dict()` and a JSON-able `record` to the new `folder`.

    `target` is the fingerprint of the target's embedding. Each entry of `extra` becomes one more
    file under training/.
    """
    files = {WEIGHTS_FILE: _weights_of(state, model)}
    files[TRAINER_FILE] = {n: t for n, t in state.items() if not n.startswith(_WEIGHT_PREFIX)}
    files |= {f"training/{name}.safetensors": dict(part) for name, part in (extra or {}).items()}
    if folder.exists():
        raise FileExistsError(f"{folder}: must not exist")
    with new_folder(folder) as temporary:
        (temporary / TRAINER_FILE).parent.mkdir()
        for file, tensors in files.items():
            save_tensors(tensors, temporary / file, metadata={"format": "pt"})
        (temporary / _RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")
        save_draft_config(temporary, model.config, target, model.fc.weight.dtype)


def _weights_of(state: Mapping[str, Tensor], model: DraftModel) -> dict[str, Tensor]:
    """Return the weights in `state`. ValueError unless they are the drafter's own, and all."""
    weights = {
        name.removeprefix(_WEIGHT_PREFIX): tensor
        for name, tensor in state.items()
        if name.startswith(_WEIGHT_PREFIX)
    }
    if wrong := sorted(weights.keys() ^ model.state_dict().keys()):
        names = ", ".join(wrong[:5])
        raise ValueError(f"drafter state: {names}: must hold exactly the drafter's own parameters")
    return weights


def find_newest(root: Path) -> Path | None:
    """Return the newest checkpoint under `root`, or None."""
    return max(_saved(root), default=None)


def find_best(root: Path) -> Path | None:
    """Return the checkpoint that was last saved with `is_best`, or None."""
    pointer = root / BEST_FILE
    return root / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None


def _saved(root: Path) -> list[Path]:
    return [path for path in root.glob(f"{_PREFIX}*") if path.suffix != ".tmp"]


class AsyncDrafterCheckpointer:
    """Saves a drafter under `root` from a background thread. Keeps the `keep` newest and the best.

    A newer save replaces a save that has not started; only a newer best save replaces a best one.
    A failed write is logged.
    """

    def __init__(self, root: Path, model: DraftModel, *, keep: int = 2) -> None:
        self.root = root
        self.writing_s = 0.0  # spent by the thread
        self._model = model
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter-checkpoint")
        self._saves: list[tuple[Future[None], bool]] = []  # not known to be done, and if best
        root.mkdir(parents=True, exist_ok=True)
        for unfinished in root.glob("*.tmp"):
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
        newest = find_newest(root)
        self._next = int(newest.name.removeprefix(_PREFIX)) + 1 if newest else 0

    def save(
        self, state: Mapping[str, Tensor], record: Mapping[str, object], *, is_best: bool = False
    ) -> None:
        """Copy `DrafterTrainer.state_dict()` to the host; the thread writes it with `record`."""
        _weights_of(state, self._model)
        pending = []
        for future, was_best in self._saves:
            if future.done():
                future.result()
            elif not ((is_best or not was_best) and future.cancel()):
                pending.append((future, was_best))
        self._saves = pending
        # Not in the thread: an engine that goes to sleep frees the borrowed embedding.
        target = fingerprint_target(self._model.embedding_VD)
        copies = HostCopies()
        host = {n: copies.add(t) if t.is_cuda else t.clone() for n, t in state.items()}
        future = self._thread.submit(
            self._write, host, copies, copy.deepcopy(record), target, is_best
        )
        self._saves.append((future, is_best))

    def wait(self) -> None:
        """Wait until every requested save is written, has failed or was replaced."""
        for future, _ in self._saves:
            future.result()
        self._saves.clear()

    def close(self) -> None:
        """Finish the requested saves and end the thread."""
        self._thread.shutdown()
        self.wait()

    def _write(
        self,
        host: dict[str, Tensor],
        copies: HostCopies,
        record: Mapping[str, object],
        target: TargetFingerprint,
        is_best: bool,
    ) -> None:
        started = time.perf_counter()
        folder = self.root / f"{_PREFIX}{self._next:07d}"
        self._next += 1
        copies.wait()
        with logging_failed_writes(folder):
            write_checkpoint(folder, self._model, host, record, target=target)
            if is_best:
                replace_text(self.root / BEST_FILE, folder.name)
            self._drop_old()
        self.writing_s += time.perf_counter() - started

    def _drop_old(self) -> None:
        best = find_best(self.root)
        for folder in sorted(_saved(self.root))[: -self._keep]:
            if folder != best:
                # Rename first: a partly deleted folder must not look complete.
                shutil.rmtree(folder.rename(folder.with_name(folder.name + ".tmp")))
