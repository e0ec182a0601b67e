"""The parent process of a reward worker. When the worker or the trainer ends, it ends every process the worker started.

`keep` is the first code of the worker's program. The keeper is a "child subreaper" (Linux): it inherits every descendant whose
parent has ended, including daemons in their own sessions. It kills its children until none is left, so no process escapes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def keep(life_fd: int, control_fd: int) -> None:
    """Fork. Returns in the worker; the keeper waits for the worker's end and exits with the same status.

    The trainer holds the other end of the pipe `life_fd`. When it closes, the worker is killed. Only the worker uses
    `control_fd`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) fails")
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(life_fd)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the trainer decides when scoring ends
    os.close(control_fd)
    for descriptor in (1, 2):  # the output pipe must close when the worker ends
        os.dup2(0, descriptor)
    is_over = threading.Event()
    threading.Thread(target=_watch_trainer, args=(life_fd, worker, is_over), daemon=True).start()
    status = _wait_for(worker)
    is_over.set()
    _end_children()
    _exit_like(status)


def _watch_trainer(life_fd: int, worker: int, is_over: threading.Event) -> None:
    os.read(life_fd, 1)
    if not is_over.is_set():
        os.kill(worker, signal.SIGKILL)


def _wait_for(worker: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # also reaps inherited processes
        if pid == worker:
            return status


def _end_children() -> None:
    with contextlib.suppress(ChildProcessError):  # there is none
        while True:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)  # its children are ours now: scan again


def _children() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if int(fields[1]) == os.getpid():
            yield int(entry.name)


def _exit_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker may have left one already
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
