"""The parent of a reward worker, which ends everything that the worker leaves: programs that it
started, also those with a session of their own. `worker_process.py` starts it.

It is the same program before its imports. Its standard input comes from the trainer: a byte there
means now, and its end, also by the trainer's death, means after a moment.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import time
from contextlib import suppress

_PARENT_DEATH, _SUBREAPER = 1, 36  # of prctl
_GRACE_S = 2.0  # for an orderly end of the worker after the trainer's
_WAIT_S = 0.01  # for processes that were killed


def keep(control_fd: int) -> None:
    """Return in a child process, which becomes the worker. The parent ends with the worker's status
    when no process is left.

    The worker has the socket `control_fd` alone.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1)  # processes whose parent ends become children of this one
    worker = os.fork()
    if worker == 0:
        prctl(_PARENT_DEATH, signal.SIGKILL)
        os.setsid()  # a function that signals its process group reaches itself alone
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return
    os.close(control_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has written its own
    status = _wait(worker)
    _end_all()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _wait(worker: int) -> int:
    """Return the status of the worker, which is killed when the trainer wants it."""
    ended, poll = os.pidfd_open(worker), select.poll()
    for fd in (0, ended):
        poll.register(fd, select.POLLIN)
    if all(fd != ended for fd, _ in poll.poll()) and not os.read(0, 1):
        poll.unregister(0)
        poll.poll(1000.0 * _GRACE_S)
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)  # nothing happens to one that has ended
    return os.waitpid(worker, 0)[1]


def _end_all() -> None:
    """Kill the children of this process until there are none: children of a killed one are next."""
    own = os.getpid()
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if _parent(pid) == own:
                os.kill(int(pid), signal.SIGKILL)  # it stays until `waitpid`
        time.sleep(_WAIT_S)


def _parent(pid: str) -> int:
    """Return the parent of a process; 0 if it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
    return 0
