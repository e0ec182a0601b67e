"""Identifies the process of each rank and reads its state.

Used by heartbeat.py, parent.py and spot/rank_state.py.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def machine_id() -> str:
    """Identify this boot of this machine and the container's namespaces for processes and time."""
    parts = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.is_file():
        parts.append(boot.read_text().strip())
    for name in ("pid", "time"):
        namespace = Path("/proc/self/ns") / name
        if namespace.exists():
            parts.append(os.readlink(namespace).translate(str.maketrans("", "", ":[]")))
    return "/".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One rank's process, by default the calling one. All ranks exchange these records when the run
    starts.
    """

    rank: int
    host: str = field(default_factory=socket.gethostname)
    # equal for two ranks if and only if they share process ids and monotonic clock
    machine: str = field(default_factory=machine_id)
    pid: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The operating system's view of a process on this machine."""

    is_gone: bool
    is_stopped: bool = False  # by SIGSTOP or a debugger
    cpu_s: float = 0.0  # CPU time that it has used


def find_process(pid: int) -> psutil.Process | None:
    """Return the process of this machine that has `pid` now; None if there is none."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def state_of(process: psutil.Process | None) -> ProcessState:
    """Return the state of a process that `find_process` has found.

    A zombie counts as gone: it only waits for its parent. So does one whose pid has been reused.
    """
    try:
        if process is None or not process.is_running():
            return ProcessState(is_gone=True)
        with process.oneshot():
            status, cpu = process.status(), process.cpu_times()
    except psutil.NoSuchProcess:
        return ProcessState(is_gone=True)
    if status in _ENDED:
        return ProcessState(is_gone=True)
    is_stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return ProcessState(is_gone=False, is_stopped=is_stopped, cpu_s=cpu.user + cpu.system)
