"""What happens to files: crashes at any file operation of a checkpoint, damage, full disks, folders in use."""

from __future__ import annotations

import hashlib
import os
import pickle
import resource
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.faults.case import RUN_LIMIT_S, Case
from tests.faults.signal_faults import TRAINING, steps_saved
from tlt_megatron.trainer.manifest import hash_file, read_manifest, write_manifest

POINTER = "latest_checkpointed_iteration.txt"
_DISK_BYTES = 24 << 20
_LIMIT_BYTES = 24 << 10  # of any file, where this user may mount no disk
_NO_SPACE = "No space left on device|File too large|file write failed"  # the last is torch's


def crash_while_saving(case: Case) -> None:
    """SIGKILL of a rank at the k-th file operation of a checkpoint: the older or the new one loads."""
    case.draw_variant()
    operation = case.rng.randint(1, 24)
    plan = case.draw_moment(
        "checkpoint",
        action="kill",
        operation=operation,
        watched=str(case.run_dir / "checkpoints"),
    )
    job = case.start("run.group_timeout_s=60")
    case.finish(job)
    case.resume(at_least=max(0, plan.step - 1) if (job.folder / "reached").exists() else 0)


def full_disk_while_saving(case: Case) -> None:
    """ENOSPC at the k-th file operation: the run ends with a line, and the older checkpoint loads."""
    case.draw_variant()
    operation = case.rng.randint(1, 24)
    plan = case.draw_moment(
        "checkpoint",
        action="full_disk",
        operation=operation,
        watched=str(case.run_dir / "checkpoints"),
    )
    job = case.start("run.group_timeout_s=60")
    case.finish(job)
    happened = (job.folder / "reached").exists()
    if happened and any(job.rank_codes.values()):
        case.expect_line(job, _NO_SPACE)
    case.resume(at_least=max(0, plan.step - 1) if happened else 0)


def full_disk(case: Case) -> None:
    """The disk of the run folder fills up at some moment; with room again the run resumes."""
    case.draw_variant()
    plan = case.draw_moment(*TRAINING)
    disk = case.folder / "disk"
    is_mounted = _mount(disk)
    if is_mounted:
        case.run_dir = disk / "run"
    try:
        job = case.start("run.group_timeout_s=60")
        case.verdict.where += " tmpfs" if is_mounted else " RLIMIT_FSIZE"
        case.await_moment(job)
        ballast = disk / "ballast"
        if is_mounted:
            _fill(ballast)
        else:
            for pid in job.rank_pids.values():
                _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LIMIT_BYTES, most))
        case.release(job)
        case.finish(job)
        if any(job.rank_codes.values()):
            case.expect_line(job, _NO_SPACE)
        ballast.unlink(missing_ok=True)
        case.resume(at_least=steps_saved(plan))
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def damaged_checkpoint(case: Case) -> None:
    """The newest checkpoint is damaged: the next older one is taken with a warning, and nothing is thrown away."""
    case.draw_variant()
    newest = case.rng.randint(2, 4)
    kind = case.rng.choice(sorted(_DAMAGES))
    root = _stopped_run(case, newest)
    victim = _DAMAGES[kind](case, root / f"iter_{newest:07d}")
    case.verdict.where = f"{case.variant.name} {kind} {victim} of step {newest}"
    job = case.resume(at_least=newest - 1)
    case.expect_line(job, f"iter_{newest:07d}")


def every_checkpoint_damaged(case: Case) -> None:
    """No intact checkpoint: the run is refused with the name of a file, and does not start anew."""
    case.draw_variant()
    kind = case.rng.choice(sorted(_DAMAGES))
    root = _stopped_run(case, 2)
    for folder in sorted(root.glob("iter_*")):
        _DAMAGES[kind](case, folder)
    before = _fingerprint(case.run_dir)
    case.plan = None
    job = case.start("--resume", "auto")
    case.verdict.where = f"{case.variant.name} {kind}"
    case.finish(job)
    case.expect_refused(job)
    case.expect_line(job, r"iter_000000[12]")
    _expect_unchanged(case, before)


def damaged_pointer(case: Case) -> None:
    """The pointer is gone, empty or wrong: never a silent restart at step 0."""
    case.draw_variant()
    newest = case.rng.randint(1, 4)
    root = _stopped_run(case, newest)
    kind = case.rng.choice(["deleted", "empty", "words", "ahead"])
    case.verdict.where = f"{case.variant.name} {kind} of step {newest}"
    if kind == "deleted":
        (root / POINTER).unlink()
    else:
        text = {"empty": "", "words": "soon", "ahead": str(newest + 3)}[kind]
        (root / POINTER).write_text(text)
    before = _fingerprint(case.run_dir)
    arguments = "--resume", "auto"
    case.plan = None
    job = case.start(*arguments)
    case.finish(job)
    if set(job.rank_codes.values()) == {0}:
        case.expect_line(job, rf"restored \S*iter_{newest:07d}")
        case.expect_line(job, POINTER)
        case.expect_straight()
    else:
        case.expect_refused(job)
        case.expect_line(job, POINTER)
        _expect_unchanged(case, before)


def crafted_pickle(case: Case) -> None:
    """A file of the checkpoint is a pickle that runs a program: it is not run."""
    case.draw_variant()
    root = _stopped_run(case, 2)
    name = case.rng.choice([".metadata", "common.pt"])
    witness = case.folder / "it_ran"
    target = root / "iter_0000002" / "policy" / name
    target.write_bytes(pickle.dumps(_Crafted(str(witness))))
    _seal(root / "iter_0000002")
    case.plan = None
    job = case.start("--resume", "auto")
    case.verdict.where = f"{case.variant.name} {name}"
    case.finish(job)
    if witness.exists():
        case.verdict.lost.append(f"{target} ran a program on resume")
    case.expect_line(job, name)
    if set(job.rank_codes.values()) == {0}:
        case.expect_straight()
    else:
        case.expect_refused(job)


class _Crafted:
    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.witness}'",)


def used_folder(case: Case) -> None:
    """A fresh run in a used folder is refused and changes nothing; told to resume, it goes on."""
    case.draw_variant()
    newest = case.rng.randint(1, 4)
    _stopped_run(case, newest)
    before = _fingerprint(case.run_dir)
    case.plan = None
    job = case.start()
    case.verdict.where = f"{case.variant.name} used up to step {newest}"
    case.finish(job)
    case.expect_refused(job)
    case.expect_line(job, "run.dir|checkpoint.resume")
    _expect_unchanged(case, before)
    case.resume(at_least=newest)


def two_runs(case: Case) -> None:
    """A second run in the folder of one that is under way is refused; the first does not notice."""
    case.draw_variant()
    case.draw_moment(*TRAINING)
    first = case.start()
    case.await_moment(first)
    watched, case.plan = case.plan, None
    second = case.start(*case.rng.choice([(), ("--resume", "auto")]))
    case.verdict.where = f"{case.variant.name} {watched}"
    if not second.wait(RUN_LIMIT_S):
        case.give_up(second, "the second run was not refused")
    case.release(first)
    case.finish(first)
    case.expect_refused(second)
    case.expect_line(second, r"pid|process \d+")
    case.expect_codes(first, 0)
    case.expect_straight()


# ---- damage


def _stopped_run(case: Case, newest: int) -> Path:
    """A copy of the straight run as it was when it had saved step `newest`, with the default of two checkpoints."""
    shutil.copytree(case.variant.straight, case.run_dir)
    root = case.run_dir / "checkpoints"
    for step in range(1, case.variant.num_steps + 1):
        if not newest - 2 < step <= newest:
            shutil.rmtree(root / f"iter_{step:07d}")
        if step > newest:
            (case.run_dir / "rollouts" / f"step_{step:07d}.jsonl").unlink()
    (root / POINTER).write_text(str(newest))
    for name in ("summary.json", "trace.json"):
        (case.run_dir / name).unlink()
    shutil.rmtree(case.run_dir / "hf")
    return root


def _draw_file(case: Case, folder: Path) -> Path:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    return case.rng.choice(files)


def _flip(case: Case, folder: Path) -> str:
    path = _draw_file(case, folder)
    data = bytearray(path.read_bytes())
    data[case.rng.randrange(len(data))] ^= 1 << case.rng.randrange(8)
    path.write_bytes(data)
    return path.name


def _truncate(case: Case, folder: Path) -> str:
    path = _draw_file(case, folder)
    os.truncate(path, case.rng.randrange(path.stat().st_size))
    return path.name


def _delete(case: Case, folder: Path) -> str:
    path = _draw_file(case, folder)
    path.unlink()
    return path.name


def _zero_page(case: Case, folder: Path) -> str:
    path = _draw_file(case, folder)
    data = bytearray(path.read_bytes())
    start = case.rng.randrange(0, len(data), 4096)
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    if bytes(data) == path.read_bytes():
        data[start] ^= 1
    path.write_bytes(data)
    return path.name


_DAMAGES: dict[str, Callable[[Case, Path], str]] = {
    "bit flip": _flip,
    "truncation": _truncate,
    "deletion": _delete,
    "zeroed page": _zero_page,
}


def _seal(folder: Path) -> None:
    """Give every file in the manifest the checksum that it has now. A person who crafts a file can do so, too."""
    manifest = read_manifest(folder)
    files = {name: hash_file(folder / name) for name in manifest.files}
    write_manifest(folder, replace(manifest, files=files))


def _fingerprint(folder: Path) -> dict[str, str]:
    """Every file below but logs and the lock, by content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "logs" not in path.parts and path.name != "lock"
    }


def _expect_unchanged(case: Case, before: dict[str, str]) -> None:
    after = _fingerprint(case.run_dir)
    changed = [name for name in before if after.get(name) != before[name]]
    if changed:
        case.verdict.lost.append(f"a refused run changed {changed[:5]}")


def _mount(disk: Path) -> bool:
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)]
    return subprocess.run(command, capture_output=True).returncode == 0


def _fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
