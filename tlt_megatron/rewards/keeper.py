"""The parent process of a reward worker. When the worker or the trainer ends, it ends every process the worker started.

The keeper is a "child subreaper" (Linux): it inherits every descendant whose parent has ended, including daemons in their own
sessions. It kills its children until none is left, so no process escapes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
# Only the trainer decides when scoring ends.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def keep(life_fd: int, control_fd: int) -> None:
    """Fork. Returns in the worker. The keeper waits for the worker's end and exits with its status modulo 256.

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
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.close(control_fd)
    for descriptor in (1, 2):  # the output pipe must close when the worker ends
        os.dup2(0, descriptor)
    threading.Thread(target=_follow_trainer, args=(life_fd,), daemon=True).start()
    pid, status = os.waitpid(-1, 0)  # also reaps inherited processes
    while pid != worker:
        pid, status = os.waitpid(-1, 0)
    with contextlib.suppress(ChildProcessError):  # there is none
        while True:
            _kill_children()
            os.waitpid(-1, 0)  # its children are ours now: kill again
    os._exit(os.waitstatus_to_exitcode(status) % 256)


def _follow_trainer(life_fd: int) -> None:
    os.read(life_fd, 1)
    _kill_children()


def _kill_children() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
