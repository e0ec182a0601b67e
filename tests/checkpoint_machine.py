"""Checkpoints as a state machine: saves that are cut off at any file operation, damage, resumes, in
any order.

What must hold: the newest intact checkpoint is the one that loads, a save that did not end takes
nothing away, the pointer's target stays. The policy is a single number here, so a save costs
milliseconds; the file operations are the real ones.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.faults.file_faults import damage_file
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.trainer.saving.manifest import MANIFEST, POINTER, read_pointer
from tlt_megatron.trainer.saving.run_checkpoint import CheckpointManager, SavedRun, find_saved_run

KEEP = 2
_CUT_OFF, _NOT_SAVED = 9, 10  # exit codes of a process that was cut off, or whose disk was full


class NumberModel:
    """A policy whose whole state is one number."""

    value = 0

    def save(self, path: Path) -> None:
        """Write the state into an empty folder, as a policy does."""
        (path / "__0_0.distcp").write_text(str(self.value))
        (path / ".metadata").write_text("one number")

    def load(self, path: Path) -> None:
        """Restore what `save` wrote."""
        self.value = int((path / "__0_0.distcp").read_text())


class CheckpointMachine(RuleBasedStateMachine):
    """`intact` are the values of the checkpoints that should load, by folder, in the order of
    writing.
    """

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.intact: dict[Path, int] = {}
        self.is_pointer_ours = True  # not damaged since the last save
        self.step = self.num_values = 0
        self.model = NumberModel()
        self.manager = self.make_manager()

    def make_manager(self) -> CheckpointManager:
        """Return the manager that a new process of the run makes."""
        return CheckpointManager(
            root=self.root, models={"policy": self.model}, keep=KEEP, world=SINGLE
        )

    def teardown(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.root)

    @initialize()
    def first(self) -> None:
        """Save once, so that there is something to lose."""
        self.save(ahead=1)

    @rule(ahead=st.integers(1, 3))
    def save(self, ahead: int) -> None:
        """Save without a fault."""
        self.num_values += 1
        self.step += ahead
        self.model.value = self.num_values
        self.note(self.manager.save(self.step, {"value": self.num_values}), self.num_values)
        self.is_pointer_ours = True

    @rule(ahead=st.integers(1, 2), operation=st.integers(1, 40), is_full=st.booleans())
    def cut_off_save(self, ahead: int, operation: int, is_full: bool) -> None:
        """End the process, or fill the disk, at a file operation of a save. Then resume from what
        is there.
        """
        self.num_values += 1
        value, before = self.num_values, list(self.intact)
        pid = os.fork()
        if not pid:
            self.save_until(self.step + ahead, operation, is_full)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, _CUT_OFF, _NOT_SAVED), code
        saved = self.find()
        held = self.intact.get(before[-1]) if before else None
        found = saved.state["value"] if saved else None
        assert found in (held, value), f"{found} loads, {held} was there and {value} being saved"
        assert code != 0 or found == value
        if saved is not None and found == value:
            assert saved.folder.name.removesuffix(".tmp") == f"iter_{self.step + ahead:07d}"
            self.note(saved.folder, value)
        self.intact = {path: v for path, v in self.intact.items() if path.exists()}
        self.resume()

    def save_until(self, step: int, operation: int, is_full: bool) -> None:
        """Save in this forked process, which the given file operation cuts off. Never returns."""
        code = 70
        cut_off_at(operation, self.root, is_full)
        self.model.value = self.num_values
        try:
            self.manager.save(step, {"value": self.num_values})
            code = 0
        except (OSError, RuntimeError):
            code = _NOT_SAVED if is_full else code
        finally:
            os._exit(code)

    @precondition(lambda self: self.intact)
    @rule(seed=st.integers(0, 1 << 16))
    def damage(self, seed: int) -> None:
        """Damage any file of any checkpoint."""
        rng = random.Random(seed)
        folder = rng.choice(sorted(self.intact))
        damage_file(rng, folder)
        del self.intact[folder]

    @rule(text=st.sampled_from([None, "", "soon", "7", "1"]))
    def damage_pointer(self, text: str | None) -> None:
        """Remove the pointer, tear it, or let it name another step."""
        (self.root / POINTER).unlink(missing_ok=True)
        if text is not None:
            (self.root / POINTER).write_text(text)
        self.is_pointer_ours = False

    @rule()
    def resume(self) -> None:
        """Let a new process take the newest intact checkpoint. It refuses if all are damaged."""
        self.manager = self.make_manager()
        saved = self.find()
        if not self.intact:
            assert saved is None
            shutil.rmtree(self.root)  # as a user does when nothing can be loaded
            self.root.mkdir()
            self.step, self.is_pointer_ours = 0, True
            return
        newest = list(self.intact)[-1]
        assert saved is not None
        assert (saved.folder, saved.state["value"]) == (newest, self.intact[newest])
        value = self.intact.pop(newest)
        folder = self.manager.restore(saved)
        assert folder.suffix != ".tmp", "a resume finishes the rename of a sealed checkpoint"
        assert self.model.value == value
        assert read_pointer(self.root) == saved.step, "a resume moves the pointer"
        self.is_pointer_ours = True
        left = [path for path in self.root.rglob("*.tmp") if not (path / MANIFEST).exists()]
        assert not left, "a resume removes what a save has left"
        self.intact[folder] = value
        self.step = saved.step

    def find(self) -> SavedRun | None:
        """Return what a resumed run starts from. None if there is nothing, or if the resume is
        refused because no checkpoint is intact.
        """
        try:
            return find_saved_run(self.root, SINGLE)
        except ValueError:
            if self.intact:
                raise
            return None

    @invariant()
    def newest_stay(self) -> None:
        """Nothing that should load is gone, and the pointer's target is there."""
        for folder in list(self.intact)[-KEEP:]:
            assert folder.is_dir(), f"{folder.name} is gone"
        if self.is_pointer_ours and (step := read_pointer(self.root)) is not None:
            assert self.manager.folder(step).is_dir(), f"the pointer's target {step} is gone"

    def note(self, folder: Path, value: int) -> None:
        """Note a new checkpoint as the newest, and forget the older ones that are gone."""
        self.intact.pop(folder, None)
        self.intact[folder] = value
        self.intact = {path: v for path, v in self.intact.items() if path.exists()}


def cut_off_at(operation: int, root: Path, is_full: bool) -> None:
    """End this process at the given operation on files below `root`. With `is_full` the disk is
    full from that operation on.
    """
    count = 0

    def on_audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        is_file = event.startswith(("open", "os.", "shutil.")) and arguments
        if not is_file or not isinstance(arguments[0], str | os.PathLike):
            return
        if not str(arguments[0]).startswith(str(root)):
            return
        count += 1
        if count >= operation and not is_full:
            os._exit(_CUT_OFF)
        takes_space = event in ("os.mkdir", "os.rename") or (
            event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if count >= operation and takes_space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(on_audit)
