"""Identifies the process of each rank and reads its state.

Used by heartbeat.py, job_store.py and spot/rank_state.py.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One rank's process. All ranks exchange these records when the run starts."""

    rank: int
    host: str
    machine: str  # equal for two ranks if and only if they share process ids and monotonic clock
    pid: int
    started: float  # `_start_of` the process: detects a reused pid

    @staticmethod
    def own(rank: int) -> RankProcess:
        """Return the calling process."""
        return RankProcess(
            rank=rank,
            host=socket.gethostname(),
            machine=machine_id(),
            pid=os.getpid(),
            started=_start_of(psutil.Process()),
        )

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The operating system's view of a process on this machine."""

    is_gone: bool
    is_stopped: bool = False  # by SIGSTOP or a debugger
    cpu_s: float = 0.0  # CPU time that it has used


def state_of(process: RankProcess) -> ProcessState:
    """Return the state of a rank on this machine.

    A zombie counts as gone: it only waits for its parent.
    """
    try:
        seen = psutil.Process(process.pid)
        if _start_of(seen) != process.started:
            return ProcessState(is_gone=True)
        with seen.oneshot():
            status, cpu = seen.status(), seen.cpu_times()
    except psutil.NoSuchProcess:
        return ProcessState(is_gone=True)
    if status in _ENDED:
        return ProcessState(is_gone=True)
    is_stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return ProcessState(is_gone=False, is_stopped=is_stopped, cpu_s=cpu.user + cpu.system)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not noticed yet."""
    try:
        return psutil.Process(pid).status() in _ENDED
    except psutil.NoSuchProcess:
        return True


def _start_of(process: psutil.Process) -> float:
    """Return when a process started: clock ticks since boot. psutil's create_time() changes when
    the wall clock is set.
    """
    if sys.platform != "linux":
        return process.create_time()
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
        return float(stat.rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(process.pid) from None


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
