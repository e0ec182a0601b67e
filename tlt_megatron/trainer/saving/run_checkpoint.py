"""Checkpoints of the whole run in Megatron's layout: <root>/iter_0000010/ and a pointer file.

A checkpoint holds policy/ (torch_dist, reshards on load), critic/ and reference/ in the same format
where they are trained or replaced, trainer_state.json, manifest.json, and the folders of the
drafter. It is written to a .tmp folder, fsynced, given its manifest and renamed; then the pointer
moves. So a crash at any time leaves the last good checkpoint loadable. A load verifies every file
and takes the newest intact checkpoint, by the order of writing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tlt_megatron.config.load import check_record
from tlt_megatron.config.ranges import Count, NonNegative, Section
from tlt_megatron.policy.batching import balance_by_size
from tlt_megatron.policy.interfaces import SavedModel
from tlt_megatron.runtime.collectives import call_on_first, gather_objects
from tlt_megatron.runtime.durable import replace_text, sync_path, sync_tree
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.saved_files import read_json
from tlt_megatron.trainer.saving.manifest import (
    POINTER,
    FileRecord,
    Manifest,
    checkpoint_folders,
    folder_number,
    hash_file,
    is_checkpoint,
    list_checkpoints,
    list_files,
    points_to,
    problem_of,
    read_manifest,
    write_manifest,
    writer_of,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

STATE_FILE = "trainer_state.json"
_TORCH_WRITER = "inline_container"  # names torch's zip writer, whose errors are RuntimeErrors
_FULL_BYTES = 1 << 20  # a disk with less free space has no room for a file of a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSection(Section):
    """The state of `data.prompts.PromptSampler`."""

    draw_index: Count = 0
    path: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection(Section):
    """The state of `trainer.step_report.RunReport`."""

    last_eval_step: int = -1
    seconds: NonNegative = 0.0
    written: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSection(Section):
    """What trainer_state.json must hold. Older checkpoints lack the report."""

    step: Count
    critic_from: Count = 0
    sampler: SamplerSection = field(default_factory=SamplerSection)
    report: ReportSection = field(default_factory=ReportSection)
    identity: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    num_ranks: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """An intact checkpoint: every file is as it was written."""

    folder: Path
    state: dict[str, Any]  # the content of trainer_state.json, checked by `StateSection`
    is_newest: bool = False  # the newest of its folder; False: the user named this one

    @property
    def step(self) -> int:
        """Return the number of RL steps done."""
        return int(self.state["step"])


def find_saved_run(path: Path, world: Group) -> SavedRun | None:
    """Return the checkpoint of `find_intact` with its saved state. A collective of all ranks."""
    folder = find_intact(path, world)
    if folder is None:
        return None
    state = call_on_first(lambda: _read_state(folder), world)
    return SavedRun(folder=folder, state=state, is_newest=not is_checkpoint(path))


def _read_state(folder: Path) -> dict[str, Any]:
    file = folder / STATE_FILE
    state = read_json(file)
    found = check_record(StateSection, _known(state, StateSection), file)
    if folder_number(folder) not in (None, found.step):
        raise ValueError(f"{file} is damaged: step={found.step} must be that of the folder")
    return state


def _known(state: Mapping[str, Any], section: Any) -> dict[str, Any]:
    """Return the keys that this version checks, also of the sections inside. Others have more."""
    known = {key: state[key] for each in fields(section) if (key := each.name) in state}
    for name, inner in (("sampler", SamplerSection), ("report", ReportSection)):
        if isinstance(known.get(name), dict):
            known[name] = _known(known[name], inner)
    return known


def find_intact(path: Path, world: Group) -> Path | None:
    """Return the newest intact checkpoint under `path`, or `path` itself if it is one.

    A collective of all ranks. Returns None if there is no checkpoint. Warns of newer broken
    checkpoints and of a wrong pointer. If none is intact, ValueError names the broken file of each;
    the same for a pointer without a checkpoint.
    """
    found, problems = call_on_first(
        lambda: (
            ([(path, read_manifest(path))], []) if is_checkpoint(path) else list_checkpoints(path)
        ),
        world,
    )
    for folder, manifest in found:
        problem = _verify(folder, manifest, world)
        if problem is None:
            if problems and world.is_first:
                log.warning("%s is the newest intact checkpoint: %s", folder, "; ".join(problems))
            return folder
        problems.append(problem)
    if problems:
        raise ValueError(f"no checkpoint in {path} is intact: {'; '.join(problems)}")
    return None


def _verify(folder: Path, manifest: Manifest, world: Group) -> str | None:
    """Return the first problem with the files, or None, on all ranks. Each reads its share."""
    files = sorted(manifest.files.items())
    shares = balance_by_size([record.num_bytes for _, record in files], world.size)
    own = (files[index] for index in shares[world.rank])
    problem = next(filter(None, (problem_of(folder / name, record) for name, record in own)), None)
    return next(filter(None, gather_objects(problem, world)), None)


@dataclass(kw_only=True)
class CheckpointManager:
    """Saves and restores. Every method is a collective; only rank 0 renames and deletes."""

    root: Path
    models: Mapping[str, SavedModel]  # "policy", "critic" if any, "reference" if it changes
    keep: int  # newest checkpoints that are kept; 0: all
    world: Group
    about: Mapping[str, object] = field(default_factory=dict)  # added to every state (identity.py)

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.root / f"iter_{step:07d}"

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        save_part: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, in place of one that is there. Returns its folder.

        `state` is JSON-able; rank 0's is written. Every rank calls `save_part` to write its own
        files into the given folder. RuntimeError names the rank that could not write; earlier
        checkpoints stay intact.
        """
        final = self.folder(step)
        temporary = self.root / f"{final.name}.tmp"
        text = json.dumps({**self.about, "step": step, **state})
        self._together(lambda: self._prepare(temporary), final)
        try:
            for name, model in self.models.items():  # makes collectives: no rank may leave early
                model.save(temporary / name)
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _TORCH_WRITER not in str(error):
                raise  # a collective, say
            raise RuntimeError(self._failure(final, error)) from error
        self._together(lambda: self._write_rest(temporary, text, save_part), final)
        parts = self._together(lambda: self._hash_own(temporary), final)
        files = {name: record for part in parts for name, record in part.items()}
        self._together(lambda: self._commit(temporary, final, step, files), final)
        return final

    def restore(self, saved: SavedRun) -> Path:
        """Load the weights and the optimizer states of `saved` into the models. Returns its folder.

        If the folder is this run's, first finishes a save that a crash has cut off. A critic or a
        reference that is not in the checkpoint starts anew.
        """
        folder = saved.folder
        if folder.parent.resolve() == self.root.resolve():
            (folder, *_) = self._together(lambda: self._finish(saved), folder)
        for name, model in self.models.items():
            if name == "policy" or call_on_first((folder / name).is_dir, self.world):
                model.load(folder / name)
            elif self.world.is_first:
                log.warning("%s holds no %s: it starts anew", folder, name)
        log.info("restored %s", folder)
        return folder

    def _together(self, work: Callable[[], T], final: Path) -> list[T]:
        """Return the results of `work` on all ranks. If one fails, all raise its RuntimeError."""
        result, failure = None, None
        try:
            result = work()
        except OSError as error:
            failure = self._failure(final, error)
        parts = gather_objects((result, failure), self.world)
        for _, failed in parts:
            if failed is not None:
                raise RuntimeError(failed)
        return [part for part, _ in parts]  # type: ignore[misc]

    def _failure(self, final: Path, error: OSError | RuntimeError) -> str:
        where = f"rank {self.world.rank} on {socket.gethostname()}: "
        reason, full = str(error).partition("\n")[0], os.strerror(errno.ENOSPC)
        if isinstance(error, RuntimeError) and shutil.disk_usage(self.root).free < _FULL_BYTES:
            reason = f"{full} ({reason})"
        if full in reason:
            disk = next(path for path in self.root.absolute().parents if path.is_mount())
            reason += f"; the disk at {disk} is full"
        if reason.startswith("rank "):  # another rank's error, from mcore/megatron_checkpoint.py
            where = ""
        return f"{where}checkpoint {final} was not written: {reason}"

    def _prepare(self, temporary: Path) -> None:
        if self.world.is_first:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            for name in self.models:
                (temporary / name).mkdir(parents=True)

    def _write_rest(
        self, temporary: Path, text: str, save_part: Callable[[Path], None] | None
    ) -> None:
        if save_part is not None:
            save_part(temporary)
        if self.world.is_first:
            (temporary / STATE_FILE).write_text(text, encoding="utf-8")

    def _hash_own(self, folder: Path) -> dict[str, FileRecord]:
        """Fsync and hash the files that this rank wrote, while they are still in its page cache."""
        own = {}
        for name in list_files(folder):
            if writer_of(name, self.world.size) == self.world.rank:
                sync_path(folder / name)
                own[name] = hash_file(folder / name)
        return own

    def _commit(
        self, temporary: Path, final: Path, step: int, files: Mapping[str, FileRecord]
    ) -> None:
        """Write the manifest and publish. With a manifest, `temporary` counts as a checkpoint."""
        if not self.world.is_first:
            return
        newest = max((m.order for _, m in list_checkpoints(self.root)[0]), default=0)
        sync_tree(temporary)
        write_manifest(temporary, Manifest(step=step, order=newest + 1, files={**files}))
        self._publish(temporary, final, step)
        try:
            self._drop_old()
        except OSError as error:
            log.warning("%s is saved, but old checkpoints are not deleted: %s", final, error)

    def _publish(self, temporary: Path, final: Path, step: int) -> None:
        """Rename and move the pointer, on rank 0."""
        if self.world.is_first:
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            sync_path(self.root)
            replace_text(self.root / POINTER, str(step))

    def _finish(self, saved: SavedRun) -> Path:
        """Do what a crash kept a save from doing, on rank 0. Return the checkpoint's folder.

        The rename comes first: a new save of the same step would else delete the checkpoint before
        it is written again. The pointer moves unless the user named an older checkpoint. What is
        left of a save or of a deletion goes. A newer folder with a manifest stays: its files are
        damaged, or the user named an older one.
        """
        folder, final = saved.folder, self.folder(saved.step)
        if not self.world.is_first:
            return folder
        if folder.name == f"{final.name}.tmp":
            self._publish(folder, final, saved.step)
            folder = final
        elif saved.is_newest and not points_to(self.root, saved.step):
            replace_text(self.root / POINTER, str(saved.step))
        orders = {each: manifest.order for each, manifest in list_checkpoints(self.root)[0]}
        for each in checkpoint_folders(self.root):
            if each.suffix == ".tmp" and orders.get(each, 0) <= orders.get(folder, 0):
                shutil.rmtree(each, ignore_errors=True)
        (self.root / f"{POINTER}.tmp").unlink(missing_ok=True)
        return folder

    def _drop_old(self) -> None:
        """Delete all but the newest, by the order of writing. The newest is the pointer's
        target.
        """
        orders = {folder: manifest.order for folder, manifest in list_checkpoints(self.root)[0]}
        folders = sorted(checkpoint_folders(self.root), key=lambda folder: orders.get(folder, 0))
        complete = [folder for folder in folders if folder.suffix != ".tmp"]
        kept = set(complete[-self.keep :] if self.keep else complete)
        dropped = [folder for folder in folders if folder not in kept]
        # Unfinished saves first: they have the names that the others are renamed to.
        dropped.sort(key=lambda folder: folder.suffix != ".tmp")
        for folder in dropped:
            # Rename first: a partly deleted folder must not count as a broken checkpoint.
            hidden = folder.with_suffix(".tmp")
            if hidden != folder:
                folder.rename(hidden)
            shutil.rmtree(hidden)
