"""Finds the processes of an SGLang engine, checks that they live and answer, and ends them.

SGLang kills its parent's whole process tree if a child dies, and every child, reward workers too,
when it shuts down. Here a death or a hang raises an error, and only the engine's processes end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

import psutil

_T = TypeVar("_T")
log = logging.getLogger(__name__)

_POLL_S = 0.2
_END_TIMEOUT_S = 30.0


class EngineProcesses:
    """Children of this process that started together with an engine.

    Their own children are not watched. They may end before the engine: torch's compile workers do
    after a minute without work, and on a GPU the schedulers start some.
    """

    def __init__(self) -> None:
        self._before = {child.pid for child in psutil.Process().children()}
        self._own: list[psutil.Process] = []
        self._has_complained = False

    def note_started(self) -> None:
        """Record all new children as the engine's."""
        self._own = self._new()

    def complain(self, _signum: int, _frame: FrameType | None) -> None:
        """Handle SIGQUIT, which SGLang's processes send to report a failure."""
        self._has_complained = True

    def failure(self) -> str | None:
        """Return what is wrong with the engine's processes, or None."""
        dead = [str(process.pid) for process in self._own if not _is_alive(process)]
        if dead:
            return f"its process {', '.join(dead)} has died (the reason is in its output above)"
        if self._has_complained:
            return "one of its processes reported a failure (the reason is in its output above)"
        return None

    def describe(self) -> str:
        """Return name, pid and state of each, such as `sglang::scheduler (pid 812, stopped)`."""
        return ", ".join(_describe(process) for process in self._own) or "no process"

    def end(self) -> None:
        """Kill all of them and their descendants, and wait until they have ended."""
        processes = self._own or self._new()
        for process in list(processes):
            with suppress(psutil.NoSuchProcess):
                processes += process.children(recursive=True)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(processes, timeout=_END_TIMEOUT_S)
        if alive:
            pids = ", ".join(str(process.pid) for process in alive)
            log.warning("processes %s of the sglang engine do not end", pids)
        self._own = []

    def _new(self) -> list[psutil.Process]:
        children = psutil.Process().children()
        return [c for c in children if c.pid not in self._before and not _is_shared(c)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        name = (process.cmdline() or [process.name()])[0]
        return f"{name} (pid {process.pid}, {process.status()})"
    except psutil.NoSuchProcess:
        return f"pid {process.pid}, gone"


def _is_shared(process: psutil.Process) -> bool:
    """Whether it is Python's resource tracker, which is not the engine's, or has ended."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return True


@contextmanager
def ended_if_late(processes: EngineProcesses, timeout_s: float) -> Iterator[threading.Event]:
    """End an engine's processes if the body, its start, takes too long. SGLang's start then raises.

    The event is set if it was too late."""
    is_done, is_late = threading.Event(), threading.Event()

    def watch() -> None:
        waited_s = timeout_s
        while not is_done.wait(waited_s):
            is_late.set()
            processes.end()
            waited_s = _POLL_S  # more processes may still be starting

    thread = threading.Thread(target=watch, daemon=True, name="sglang-start")
    thread.start()
    try:
        yield is_late
    finally:
        is_done.set()
        thread.join()


class Silence:
    """Detects an engine that lives but sends no message for `timeout_s` seconds of a wait.

    `last_message` returns a value that every message of the engine changes. `probe` sends a request
    whose answer is a message, so a long phase without results does not count. Use one per wait.
    """

    def __init__(
        self, last_message: Callable[[], object], probe: Callable[[], None], timeout_s: float
    ) -> None:
        self._last_message = last_message
        self._probe = probe
        self._timeout_s = timeout_s
        self._seen = last_message()
        self._silent_s = 0.0
        self._asked = time.monotonic()
        self._has_probed = False

    def failure(self) -> str | None:
        """Return what is wrong, or None. Call it every `_POLL_S`. Probes after half of the timeout.

        A call adds at most 2 * `_POLL_S`: a rank that was stopped received no messages either."""
        now, seen = time.monotonic(), self._last_message()
        self._silent_s += min(now - self._asked, 2 * _POLL_S)
        self._asked = now
        if seen != self._seen:
            self._seen, self._silent_s, self._has_probed = seen, 0.0, False
        if self._silent_s >= self._timeout_s:
            return f"it has sent nothing for sglang.request_timeout_s={self._timeout_s:g}"
        if self._silent_s >= self._timeout_s / 2 and not self._has_probed:
            self._has_probed = True
            self._probe()
        return None


async def watched(work: Awaitable[_T], failure: Callable[[], str | None]) -> _T:
    """Return the result of `work`. RuntimeError as soon as `failure` returns a reason."""
    task = asyncio.ensure_future(work)
    while True:
        done, _ = await asyncio.wait({task}, timeout=_POLL_S)
        if done:
            return task.result()
        reason = failure()
        if reason is not None:
            task.cancel()
            raise RuntimeError(reason)
