"""Checkpoints as a state machine: saves that are cut off at any file operation, damage, resumes, in any order.

What must hold: the newest intact checkpoint is the one that loads, a save that did not end takes nothing away, the pointer's
target stays. The policy is a single number here, so that a save costs milliseconds; the file operations are the real ones.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.trainer.checkpoint import CheckpointManager, SavedRun, find_saved_run
from tlt_megatron.trainer.manifest import POINTER, read_pointer

KEEP = 2
_CUT_OFF = 9  # exit code of a process that was cut off
_NOT_SAVED = 10
_TAKES_SPACE = ("open", "os.mkdir", "os.rename")  # what fails on a full disk


class NumberModel:
    """A policy whose whole state is one number."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def save(self, path: Path) -> None:
        """As a policy does, into an empty folder."""
        (path / "__0_0.distcp").write_text(str(self.value))
        (path / ".metadata").write_text("one number")

    def load(self, path: Path) -> None:
        """What `save` wrote."""
        self.value = int((path / "__0_0.distcp").read_text())


class CheckpointMachine(RuleBasedStateMachine):
    """`intact` are the values of the checkpoints that should load, by folder, in the order of writing."""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.intact: dict[Path, int] = {}
        self.is_pointer_ours = True  # nobody has damaged it since the last save
        self.step = 0
        self.num_values = 0
        self.manager = self.make_manager()

    def make_manager(self) -> CheckpointManager:
        """Of a new process of the run."""
        return CheckpointManager(self.root, NumberModel(), keep=KEEP, world=SINGLE)

    def teardown(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.root)

    @initialize()
    def first(self) -> None:
        """There is something to lose."""
        self.save(ahead=1)

    @rule(ahead=st.integers(1, 3))
    def save(self, ahead: int) -> None:
        """A save that ends well."""
        value = self.next_value()
        self.step += ahead
        self.manager.models["policy"].value = value
        self.note(self.manager.save(self.step, {"value": value}), value)
        self.is_pointer_ours = True

    @rule(ahead=st.integers(1, 2), operation=st.integers(1, 40), is_full=st.booleans())
    def cut_off_save(self, ahead: int, operation: int, is_full: bool) -> None:
        """The process ends, or the disk is full, at a file operation of a save. The run resumes from what is there."""
        value = self.next_value()
        before = list(self.intact)
        step = self.step + ahead
        folder = self.manager.folder(step)
        code = in_child(lambda: self.save_until(step, value, operation, is_full))
        assert code in (0, _CUT_OFF, _NOT_SAVED), code
        saved = self.find()
        held = self.intact.get(before[-1]) if before else None
        found = saved.state["value"] if saved else None
        assert found in (held, value), f"{found} loads, {held} was there and {value} being saved"
        assert code != 0 or found == value
        if found == value:
            assert saved is not None
            assert saved.folder.name.removesuffix(".tmp") == folder.name
            self.note(saved.folder, value)
        self.intact = {path: v for path, v in self.intact.items() if path.exists()}
        self.resume()

    def save_until(self, step: int, value: int, operation: int, is_full: bool) -> None:
        """In a process of its own: save, and be cut off at the given file operation."""
        cut_off_at(operation, self.root, is_full)
        self.manager.models["policy"].value = value
        try:
            self.manager.save(step, {"value": value})
        except (OSError, RuntimeError):
            assert is_full
            os._exit(_NOT_SAVED)

    @precondition(lambda self: self.intact)
    @rule(data=st.data(), kind=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, data: st.DataObject, kind: str) -> None:
        """Any file of any checkpoint."""
        folder = data.draw(st.sampled_from(sorted(self.intact)))
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = data.draw(st.sampled_from(files))
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if kind == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        elif kind == "cut":
            path.write_bytes(content[:place])
        else:
            path.unlink()
        del self.intact[folder]

    @rule(text=st.sampled_from([None, "", "soon", "7", "1"]))
    def damage_pointer(self, text: str | None) -> None:
        """It is gone, torn, or names another step."""
        (self.root / POINTER).unlink(missing_ok=True)
        if text is not None:
            (self.root / POINTER).write_text(text)
        self.is_pointer_ours = False

    @rule()
    def resume(self) -> None:
        """A new process takes the newest intact checkpoint, or refuses where every one is damaged."""
        self.manager = self.make_manager()
        saved = self.find()
        if not self.intact:
            assert saved is None
            self.start_anew()
            return
        newest = list(self.intact)[-1]
        assert saved is not None
        assert (saved.folder, saved.state["value"]) == (newest, self.intact[newest])
        value = self.intact.pop(newest)
        folder = self.manager.restore(saved)
        assert folder.suffix != ".tmp", "a resume finishes the rename of a sealed checkpoint"
        assert self.manager.models["policy"].value == value
        self.intact[folder] = value
        self.step = saved.step

    def find(self) -> SavedRun | None:
        """What a resumed run starts from; None too where it is refused, which is right only if nothing is intact."""
        try:
            return find_saved_run(self.root, SINGLE)
        except ValueError:
            if self.intact:
                raise
            return None

    def start_anew(self) -> None:
        """As a user does when nothing can be loaded: in an empty folder."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        self.step = 0
        self.is_pointer_ours = True

    @invariant()
    def newest_stay(self) -> None:
        """Nothing that should load is gone, and the pointer's target is there."""
        for folder in list(self.intact)[-KEEP:]:
            assert folder.is_dir(), f"{folder.name} is gone"
        if self.is_pointer_ours and (step := read_pointer(self.root)) is not None:
            assert self.manager.folder(step).is_dir(), f"the pointer's target {step} is gone"

    def note(self, folder: Path, value: int) -> None:
        """A checkpoint stands; it is the newest, and older ones may have been dropped."""
        self.intact.pop(folder, None)
        self.intact[folder] = value
        self.intact = {path: v for path, v in self.intact.items() if path.exists()}

    def next_value(self) -> int:
        """Another one for each save."""
        self.num_values += 1
        return self.num_values


def in_child(function: Callable[[], None]) -> int:
    """Exit code of a forked process that calls it: 0, or what it exits with."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 70
    try:
        function()
        code = 0
    finally:
        os._exit(code)


def cut_off_at(operation: int, root: Path, is_full: bool) -> None:
    """In this process: end it at the given operation on files below `root`, or let the disk be full from there on."""
    count = 0

    def on_audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if not event.startswith(("open", "os.", "shutil.")) or not arguments:
            return
        if not isinstance(arguments[0], str | os.PathLike):
            return
        if not str(arguments[0]).startswith(str(root)):
            return
        count += 1
        is_read = event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if count >= operation and not is_full:
            os._exit(_CUT_OFF)
        if count >= operation and not is_read and event in _TAKES_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(on_audit)
