"""The launcher and its ranks as processes, and what is left of them.

The launcher is launch/torchrun.py itself, forked from a process where everything is imported. Ranks
that were forked before the launcher starts a thread take the place of those that it would start
from the disk, so a run starts in a second.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.faults.probe import Moment, install
from tests.ranks import free_port

PROGRAM = Path(__file__).resolve().parent.parent.parent / "launch" / "pretrain_rl.py"
_PR_SET_CHILD_SUBREAPER = 36
_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # by launch/torchrun.py


def adopt_orphans() -> None:
    """From now on descendants whose parent dies become children of this process, whatever their
    session or environment.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(pid: int | None = None) -> dict[int, str]:
    """Every live process below `pid` (default: this one), with its command line.

    A zombie with threads is still ending: they hold its files and file locks.
    """
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            if not is_zombie or len(os.listdir(f"/proc/{process.pid}/task")) > 1:
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                found[process.pid] = command.replace(b"\0", b" ").decode()[:200]
    return found


def kill_all(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal, except to those that have ended meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(kw_only=True)
class Job:
    """One start of the program.

    `folder` holds terminal.txt, pids and exit codes of ranks, and the marks of the probe.
    """

    folder: Path
    launchers: Sequence[int]  # pids, in the order of their start
    codes: dict[int, int] = field(default_factory=dict)  # the launchers', by pid; -N: signal N

    @property
    def terminal(self) -> str:
        """What launchers and ranks have written to the terminal so far."""
        return (self.folder / "terminal.txt").read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        """Whether the launchers have ended. Ranks may be left."""
        for pid in set(self.launchers) - self.codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.launchers)

    @property
    def is_success(self) -> bool:
        """Whether every launcher has ended with exit code 0."""
        return self.has_ended and not any(self.codes.values())

    @property
    def rank_pids(self) -> dict[int, int]:
        """The ranks that have started."""
        return {int(mark.suffix[1:]): int(mark.read_text()) for mark in self.folder.glob("pid.*")}

    @property
    def rank_ends(self) -> dict[int, tuple[int, float]]:
        """Exit code and time of the ranks whose launcher saw them end."""
        marks = self.folder.glob("code.*")
        return {int(m.suffix[1:]): (int(m.read_text()), m.stat().st_mtime) for m in marks}

    def signal(self, number: int, *ranks: int | None) -> None:
        """Send a signal to ranks, or to the first launcher (None), unless they have ended."""
        for rank in ranks:
            if rank is not None:
                kill_all([self.rank_pids[rank]], number)
            elif not self.has_ended:
                kill_all(self.launchers[:1], number)

    def wait(self, limit_s: float, *, count: int | None = None) -> bool:
        """Whether `count` of the launchers (default: all) ended within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not self.has_ended and len(self.codes) < (count or len(self.launchers)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def start(
    folder: Path,
    arguments: Sequence[str],
    moment: Moment | None = None,
    *,
    num_ranks: int = 2,
    num_launchers: int = 1,
    shutdown_timeout_s: int = 30,
) -> Job:
    """Start what a user types: launch/torchrun.py with `num_ranks` ranks; or several of them, as on
    several nodes.
    """
    folder.mkdir(parents=True)
    (folder / "terminal.txt").touch()
    num_local = num_ranks // num_launchers
    command = ["--nproc-per-node", str(num_local), "--shutdown-timeout", str(shutdown_timeout_s)]
    command += ["--standalone"] if num_launchers == 1 else ["--nnodes", str(num_launchers)]
    if num_launchers > 1:
        command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launchers = []
    for node in range(num_launchers):
        words = [*command, "--node-rank", str(node), str(PROGRAM), *arguments]
        play = functools.partial(_launch, folder, words, moment, num_local)
        launchers.append(os.fork() or end_with(play))
    return Job(folder=folder, launchers=launchers)


def _launch(folder: Path, command: list[str], moment: Moment | None, num_ranks: int) -> int:
    """Be launch/torchrun.py, with ranks that wait in the place of new processes; returns its exit
    code.
    """
    from launch.torchrun import main

    os.setsid()
    with open(folder / "terminal.txt", "ab") as terminal, open(os.devnull, "rb") as null:
        for number, file in enumerate((null, terminal, terminal)):
            os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    os.environ["PYTHONPATH"] = str(PROGRAM.parent.parent)
    waiting = [_fork_rank(folder, moment) for _ in range(num_ranks)]
    popen_class: Any = subprocess.Popen
    execute, note = popen_class._execute_child, popen_class._handle_exitstatus

    def hand_over(popen: Any, args: Any, *rest: Any) -> None:
        words = [str(word) for word in args]
        if str(PROGRAM) not in words:
            execute(popen, args, *rest)
            return
        environment = dict(rest[5])
        popen.pid, pipe = waiting.pop(0)
        popen.rank, popen._child_created = environment["RANK"], True
        with os.fdopen(pipe, "w") as file:
            file.write(json.dumps([environment, words[words.index(str(PROGRAM)) :]]) + "\n")
        while not (folder / f"pid.{popen.rank}").exists():  # until it leads its own session
            time.sleep(0.001)

    def note_end(popen: Any, status: int, **rest: Any) -> None:
        note(popen, status, **rest)
        if hasattr(popen, "rank"):
            _write(folder / f"code.{popen.rank}", str(popen.returncode))

    popen_class._execute_child, popen_class._handle_exitstatus = hand_over, note_end
    return main(command)


def _fork_rank(folder: Path, moment: Moment | None) -> tuple[int, int]:
    """A process that becomes a rank once it is given environment and arguments: its pid, and the
    pipe for them.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write_end)
        end_with(lambda: _run_rank(folder, os.fdopen(read_end).readline(), moment))
    os.close(read_end)
    return pid, write_end


def _run_rank(folder: Path, order: str, moment: Moment | None) -> object:
    """Run launch/pretrain_rl.py in this process as its main program, watched; returns its exit
    code.
    """
    if not order:  # the launcher has ended without it
        return 0
    environment, sys.argv = json.loads(order)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    atexit._clear()
    os.environ.clear()
    os.environ.update(environment)
    rank = int(environment["RANK"])
    faulthandler.register(signal.SIGUSR2, file=open(folder / f"stack.{rank}", "w"))  # noqa: SIM115
    _write(folder / f"pid.{rank}", str(os.getpid()))
    if moment is not None:
        install(moment, folder, rank)
    code: object = 0
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except SystemExit as end:
        code = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def end_with(program: Callable[[], object]) -> NoReturn:
    """End this forked process with the exit code that `program` returns."""
    code: object = 1
    try:
        code = program()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)


def _write(path: Path, text: str) -> None:
    """Write a file at once: a reader finds all of it or nothing."""
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.rename(path)
