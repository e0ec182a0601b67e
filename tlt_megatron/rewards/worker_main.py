"""The program of a reward worker, a child of its keeper (keeper.py). It loads the functions and scores until told to end.

Messages are JSON lines over a socket on a high descriptor, which a function is unlikely to print to or close. In: {"task",
"arguments"}. Out: {"is_async"} or {"failed"}, then for each task its number and the fields of `worker_process.Outcome` that are
not their default. The main thread runs the function, because functions may use signals (math-verify does). An error on the
socket ends the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import signal
import sys
import time
import traceback

from tlt_megatron.config.extensions import REGISTRY
from tlt_megatron.rewards.keeper import STOP_SIGNALS, keep
from tlt_megatron.rewards.reward import WeightedRewards, name_setting

_ARGUMENTS = REGISTRY["reward.function"].parameters

_HIGH_FD = 1000  # above the range that a function may close, below the usual limit of 1024
_Result = tuple[float, dict[str, float]] | BaseException
_MAX_DETAIL = 8000  # characters of a traceback; the end is kept


class _Channel:
    """The worker's end of the socket."""

    def __init__(self, control_fd: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = max(control_fd, min(_HIGH_FD, limit - 8))
        self._fd = fcntl.fcntl(control_fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(control_fd)
        self._reader = os.fdopen(self._fd, "rb", closefd=False)
        self._pid = os.getpid()

    def receive(self) -> dict | None:
        """Return the next task; None when the trainer has closed the socket."""
        line = self._reader.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def send(self, **message: object) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # a function forked, and its child returned
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]

    def send_score(
        self, task: int, start: float, result: _Result, *, is_late: bool = False
    ) -> None:
        """Send the result of a task. `result` is a reward with its further numbers, or an exception."""
        seconds = time.perf_counter() - start
        if isinstance(result, tuple):
            score, details = result
            self.send(task=task, score=score, details=details, seconds=seconds)
        else:
            failure = "timeout" if is_late else "error"
            detail = "".join(traceback.format_exception(result))[-_MAX_DETAIL:]
            self.send(task=task, failure=failure, detail=detail, seconds=seconds)


def main(weights: dict[str, float], timeout_s: float, life_fd: int, control_fd: int) -> None:
    """Score tasks until the socket closes, as a child of a keeper. Exit status 1 if a function cannot be loaded."""
    keep(life_fd, control_fd)
    _outlive_signals()
    channel = _Channel(control_fd)
    try:
        rewards = WeightedRewards(weights)
    except BaseException as error:  # also SystemExit: a user's module may raise anything
        traceback.print_exception(error)  # to the rank's log; the terminal gets one line
        is_named = isinstance(error, ValueError)
        line = str(error) if is_named else f"{name_setting(weights)} fails to load: {error!r}"
        channel.send(failed=line[-_MAX_DETAIL:])
        sys.exit(1)
    channel.send(is_async=rewards.is_async)
    if rewards.is_async:
        asyncio.run(_serve_async(channel, rewards, timeout_s))
    else:
        _serve(channel, rewards)


def _serve(channel: _Channel, rewards: WeightedRewards) -> None:
    while (task := channel.receive()) is not None:
        start = time.perf_counter()
        try:
            result: _Result = rewards.score(**_arguments(task))
        except BaseException as error:  # a function that calls exit() must not end the worker
            result = error
        channel.send_score(task["task"], start, result)


async def _serve_async(channel: _Channel, rewards: WeightedRewards, timeout_s: float) -> None:
    running: set[asyncio.Task[None]] = set()
    while (task := await asyncio.to_thread(channel.receive)) is not None:
        job = asyncio.create_task(_score_async(channel, rewards, timeout_s, task))
        running.add(job)  # the loop keeps weak references only
        job.add_done_callback(running.discard)


async def _score_async(
    channel: _Channel, rewards: WeightedRewards, timeout_s: float, task: dict
) -> None:
    start = time.perf_counter()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            result: _Result = await rewards.score_async(**_arguments(task))
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        result = error
    channel.send_score(task["task"], start, result, is_late=limit.expired())


def _arguments(task: dict) -> dict[str, object]:
    return dict(zip(_ARGUMENTS, task["arguments"], strict=True))


def _outlive_signals() -> None:
    """Do nothing at signals to stop: the trainer decides when scoring ends, by closing the socket.

    SIG_IGN and blocked signals would be inherited by programs that a reward function starts, and they could not be terminated.
    The trainer blocked these signals until this point.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
