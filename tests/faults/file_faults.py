"""What happens to files: crashes at any file operation of a checkpoint, damage, full disks, folders
in use.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from tests.faults.case import LONG, Case
from tests.faults.lab import NUM_STEPS, RUN_LIMIT_S
from tests.faults.probe import Moment
from tests.faults.process_faults import GRACE_S, KILLED, TRAINING, WATCHED, naming
from tests.faults.processes import Job
from tlt_megatron.trainer.saving.manifest import POINTER

_NO_SPACE = "No space left on device"
# File operations of a rank from which one is drawn. A save has 16 to 29 on rank 0 and 2 to 4 on
# rank 1; the rest are in the next save.
_SAVE_OPERATIONS = (24, 2)
_RESUME_OPERATIONS = (40, 20)


def crash_while_saving(case: Case) -> None:
    """SIGKILL of a rank at the k-th file operation of a checkpoint: the older or the new one
    loads.
    """
    job, moment = _start_saving(case, "kill")
    victim = moment.rank
    case.end(job, 1, KILLED, ranks=[1], line=naming(victim), within_s=GRACE_S, victims=[victim])
    case.resume(at_least=moment.saved)


def crash_while_resuming(case: Case) -> None:
    """SIGKILL of a rank at the k-th file operation of a resume, reads too: the next resume finds
    what was there.
    """
    moment = case.draw_moment("start", resumed=case.rng.randint(1, 3), action="kill")
    operation = case.rng.randint(1, _RESUME_OPERATIONS[moment.rank])
    case.moment = replace(moment, operation=operation, watched=str(case.run_dir))
    job = case.start(*WATCHED)
    case.end(job, 1, KILLED, 143, ranks=[0, 1, 143], within_s=GRACE_S, victims=[moment.rank])
    case.resume(at_least=moment.resumed_step)


def full_disk_while_saving(case: Case) -> None:
    """ENOSPC at the k-th file operation: the run ends with a line that names the disk, and the
    older checkpoint loads.
    """
    job, moment = _start_saving(case, "full_disk")
    case.end(job, 0, 1, ranks=[0, 1], line=[_NO_SPACE])
    if not job.is_success:  # with success, the run warns that old checkpoints are not deleted
        case.expect_line(job, "^pretrain_rl: ", _NO_SPACE)
    case.resume(at_least=moment.saved)


def _start_saving(case: Case, action: str) -> tuple[Job, Moment]:
    moment = case.draw_moment("checkpoint", action=action)
    operation = case.rng.randint(1, _SAVE_OPERATIONS[moment.rank])
    watched = str(case.run_dir / "checkpoints")
    case.moment = replace(moment, operation=operation, watched=watched)
    # without a part of its checkpoint that it can do without, a run goes on to its end
    return case.start(*WATCHED, LONG if action == "kill" else "run.num_steps=8"), moment


def damaged_checkpoint(case: Case) -> None:
    """The newest checkpoint is damaged: the next older one is taken with a warning, and nothing is
    thrown away.
    """
    newest = case.rng.randint(2, NUM_STEPS)
    root = case.variant.copy_stopped(case.run_dir, newest)
    case.verdict.where = f"{case.variant.name} {damage_file(case.rng, root / f'iter_{newest:07d}')}"
    job = case.resume(at_least=newest - 1)
    case.expect_line(job, f"iter_{newest:07d}")


def damaged_pointer(case: Case) -> None:
    """The pointer is gone, empty or wrong: never a silent restart at step 0."""
    newest = case.rng.randint(1, NUM_STEPS)
    root = case.variant.copy_stopped(case.run_dir, newest)
    text = case.rng.choice([None, "", "soon", str(newest + 3)])
    case.verdict.where = f"{case.variant.name} {text} at step {newest}"
    if text is None:
        (root / POINTER).unlink()
    else:
        (root / POINTER).write_text(text)
    job = case.start("--resume", "auto")
    case.end(job, 0, line=[POINTER])
    case.expect_line(job, rf"restored \S*iter_{newest:07d}")
    case.expect_straight()


def two_runs(case: Case) -> None:
    """A second run in the folder of one that is under way is refused; the first does not notice."""
    case.draw_moment(*TRAINING)
    first = case.start()
    case.await_moment(first)
    case.moment = None
    second = case.start(*case.rng.choice([(), ("--resume", "auto")]))
    if not second.wait(RUN_LIMIT_S):
        case.give_up(second, "the second run was not refused")
    case.release(first)
    case.end(first, 0, ranks=[0])
    case.end(second, 2, line=["^pretrain_rl: ", r"pid|process \d+"])
    case.expect_straight()


def damage_file(rng: random.Random, folder: Path) -> str:
    """A flipped bit, a cut, a zeroed page or a deletion, of any file; returns which."""
    path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size))
    before = path.read_bytes()
    data, kind = bytearray(before), rng.choice(["flip", "cut", "page", "delete"])
    place = rng.randrange(len(data))
    if kind == "flip":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    else:
        page = slice(place // 4096 * 4096, place // 4096 * 4096 + 4096)
        data[page] = bytes(len(data[page]))
        data[place] ^= data == before
    path.write_bytes(data)
    if kind == "delete":
        path.unlink()
    return f"{kind} {path.name} of {folder.name}"
