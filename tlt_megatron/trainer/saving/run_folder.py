"""Locks the folder of a run for one run at a time, and refuses a fresh run in a used folder.

Called by the launcher on rank 0, before torch is imported.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path

from tlt_megatron.runtime.environment_variables import program_name
from tlt_megatron.runtime.typed_command import resume_command
from tlt_megatron.trainer.saving.manifest import is_checkpoint_root

log = logging.getLogger(__name__)

LOCK_FILE = "lock"
CHECKPOINTS, LOGS = "checkpoints", "logs"
_MARKS = (CHECKPOINTS, "metrics.jsonl", "config.yaml")  # only a run that has started leaves these
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks


class RunFolder:
    """The run folder at `path`, locked for a run with this `checkpoint.resume` until `close`.
    Creates a missing folder.

    ValueError in four cases: another run holds the lock; the folder holds an earlier run that is
    not resumed; the path in `resume` holds no checkpoint; or the folder cannot be written.

    The lock is a POSIX record lock: the kernel releases it when the process ends, even by a crash.
    Child processes do not inherit it. On NFS and Lustre it works across hosts if the mount supports
    locks.
    """

    def __init__(self, path: Path, *, resume: str) -> None:
        self.path = path
        self._is_new = not path.exists()
        _check_resume(resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
            _check_kinds(path)
            with ExitStack() as stack:
                self._file = stack.enter_context(open(path / LOCK_FILE, "a+", encoding="utf-8"))
                self._lock()
                _check_unused(path, resume)
                self._file.seek(0)
                self._before = self._file.read(), os.fstat(self._file.fileno()).st_mtime_ns
                self._write_holder()
                stack.pop_all()  # the file stays open
        except OSError as error:
            raise ValueError(f"run.dir={str(path)!r}: cannot be written: {error}") from error

    def close(self) -> None:
        self._file.close()

    def withdraw(self) -> None:
        """Take back what a run that was refused has changed: an earlier run stays the newest one in
        the folder, and a folder that was made for this run is removed.
        """
        holder, changed_ns = self._before
        if holder:
            self._file.truncate(0)
            os.write(self._file.fileno(), holder.encode())
            os.utime(self.path / LOCK_FILE, ns=(changed_ns, changed_ns))
        elif self._is_new and not any((self.path / name).exists() for name in _MARKS):
            # Ranks of other nodes may still write their logs, which then stay.
            shutil.rmtree(self.path, ignore_errors=True)

    def _lock(self) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"run.dir={str(self.path)!r}: is in use by {self._read_holder()}: must be a folder that no run is using"
                ) from error
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("run.dir=%r: its file system has no locks: %s", str(self.path), error)

    def _read_holder(self) -> str:
        self._file.seek(0)
        try:
            holder = json.loads(self._file.read())
            return f"pid {holder['pid']} on {holder['host']} since {holder['started']}"
        except (ValueError, KeyError, TypeError):
            return f"another run (see {self.path / LOCK_FILE})"

    def _write_holder(self) -> None:
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        self._file.truncate(0)
        os.write(self._file.fileno(), json.dumps(holder).encode())


def owner_has_ended(path: Path) -> bool:
    """Return whether the process that locked the run folder last has ended; False also if this
    machine cannot tell.

    Asks the kernel and takes no lock. Locks of other hosts and of a file system without locks are
    not known.
    """
    return _last_lock(path) == (socket.gethostname(), False)


def _last_lock(path: Path) -> tuple[str, bool] | None:
    """Return the host of the last run in the folder, and whether it still holds the lock, as far as
    this machine knows.
    """
    if not (path / LOCK_FILE).is_file():  # a pipe would block
        return None
    try:
        with (path / LOCK_FILE).open(encoding="utf-8") as file:
            host = json.load(file)["host"]
            query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # Linux: struct flock
            answer = fcntl.fcntl(file, fcntl.F_GETLK, query)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return host, struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK


def check_run_folder(path: Path, *, resume: str) -> None:
    """Raise the ValueError that `RunFolder` would. Takes no lock and changes nothing."""
    _check_resume(resume)
    _check_kinds(path)
    lock = _last_lock(path)
    if lock is not None and lock[1]:
        raise ValueError(
            f"run.dir={str(path)!r}: is in use by a run on {lock[0]}: must be a folder that no run is using"
        )
    _check_unused(path, resume)


def _check_resume(resume: str) -> None:
    if resume not in ("auto", "never") and not is_checkpoint_root(Path(resume)):
        raise ValueError(
            f"checkpoint.resume={resume!r}: must be auto, never, a folder of checkpoints or one of them"
        )


def _check_kinds(path: Path) -> None:
    """Refuse a pipe or a device in place of a file of the run: it would block, or never end. A log
    is never read, so it may be a device, as /dev/null is.
    """
    for pattern in ("*", "*/*", f"{LOGS}/*/*"):
        for each in path.glob(pattern):
            is_device = each.is_char_device() or each.is_block_device()
            if each.is_fifo() or (is_device and each.parent.parent != path / LOGS):
                raise ValueError(f"run.dir={str(path)!r}: {each} is not a regular file")


def _check_unused(path: Path, resume: str) -> None:
    marks = [name for name in _MARKS if (path / name).exists()]
    if marks and not _is_within(resume_path(path, resume), path / CHECKPOINTS):
        raise ValueError(
            f"run.dir={str(path)!r}: holds an earlier run ({', '.join(marks)}): resume it (--resume auto), give another"
            " run.dir, or move the folder"
        )


def resume_path(run_dir: Path, resume: str) -> Path | None:
    """Return the path to search for checkpoints; None for a fresh start."""
    if resume == "never":
        return None
    return run_dir / CHECKPOINTS if resume == "auto" else Path(resume)


def how_to_go_on(run_dir: Path, resume: str) -> str:
    """Return two lines with the command that goes on with a run that has failed. "" where it has
    not saved yet and began from another run's checkpoint: its folder cannot be used again.
    """
    is_saved = is_checkpoint_root(run_dir / CHECKPOINTS)
    if not is_saved and resume not in ("auto", "never"):
        return ""
    way = "resume with" if is_saved else "nothing is saved yet; start again with"
    return f"{program_name()}: {way}:\n{resume_command(run_dir)}\n"


def _is_within(path: Path | None, folder: Path) -> bool:
    return path is not None and path.resolve().is_relative_to(folder.resolve())
