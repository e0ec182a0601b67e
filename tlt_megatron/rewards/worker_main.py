"""The program of a reward worker, started by `worker_process.WorkerProcess`: load the function, then score.

The main thread runs the reward function, because functions may use signals (math-verify does); a second thread
waits on the pipe. The pipe is the worker's life: when it closes, the worker and what it started come to an end.
Messages in: (task_id, pickled arguments). Messages out: ("ready", is_async) or ("failed", why), then for each task
(task_id, score, failure, detail, seconds), where failure is "", "error" or "timeout".
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import pickle
import select
import signal
import threading
import time
import traceback
from queue import SimpleQueue

from tlt_megatron.rewards.frames import FrameReader, pack_frame
from tlt_megatron.rewards.reward import ARGUMENTS, RewardFunction, is_async, load_reward, read_score

_READ_BYTES = 1 << 18
_EXIT_GRACE_S = 2.0
_HEARTBEAT_S = 1.0

Task = tuple[int, bytes]


class _Pipes:
    """The worker's two ends, moved away from stdin and stdout so that a `print` cannot corrupt a message.

    `tasks` yields tasks as they come, and None when the pipe closes.
    """

    def __init__(self, stuck_s: float) -> None:
        self._in_fd, self._out_fd = os.dup(0), os.dup(1)
        null_fd = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null_fd, 0)
        os.dup2(2, 1)
        os.close(null_fd)
        self._stuck_s = stuck_s
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, *message: object) -> None:
        frame = memoryview(pack_frame(message))
        with contextlib.suppress(BrokenPipeError):  # the trainer is gone: tasks says so
            while frame:
                frame = frame[os.write(self._out_fd, frame) :]

    def _receive(self) -> None:
        reader = FrameReader()
        while data := self._read():
            for task in reader.feed(data):
                self.tasks.put(task)
        self.tasks.put(None)
        time.sleep(_EXIT_GRACE_S)
        os.killpg(0, signal.SIGKILL)  # the main thread hangs in a reward function

    def _read(self) -> bytes:
        while True:
            # ends the process from a thread of C if this one does not come back: a function that hangs in C
            # keeps all others from running, and the trainer, which would kill the worker, may be dead
            faulthandler.dump_traceback_later(self._stuck_s, exit=True)
            if select.select([self._in_fd], [], [], _HEARTBEAT_S)[0]:
                return os.read(self._in_fd, _READ_BYTES)


def main(spec: str, timeout_s: float, stuck_s: float) -> int:
    """Serve until the pipe closes; the exit status. `stuck_s` bounds the life of a worker that hangs in C."""
    os.setpgid(0, 0)
    _outlive_signals()
    pipes = _Pipes(stuck_s)
    try:
        function = load_reward(spec)
    except BaseException as error:
        pipes.send("failed", _explain_load_failure(error))
        return 1
    pipes.send("ready", is_async(function))
    if is_async(function):
        asyncio.run(_serve_async(pipes, function, timeout_s))
    else:
        _serve(pipes, function)
    os.killpg(0, signal.SIGTERM)  # what the function started; this process does not mind
    return 0


def _serve(pipes: _Pipes, function: RewardFunction) -> None:
    while (task := pipes.tasks.get()) is not None:
        task_id, payload = task
        start = time.perf_counter()
        try:
            result = function(**dict(zip(ARGUMENTS, pickle.loads(payload), strict=True)))
            outcome = (read_score(result), "", "")
        except (
            BaseException
        ):  # SystemExit too: a function that calls exit() must not end the worker
            outcome = (0.0, "error", traceback.format_exc())
        pipes.send(task_id, *outcome, time.perf_counter() - start)


async def _serve_async(pipes: _Pipes, function: RewardFunction, timeout_s: float) -> None:
    running: set[asyncio.Task[None]] = set()
    while (task := await asyncio.to_thread(pipes.tasks.get)) is not None:
        job = asyncio.create_task(_score_async(pipes, function, timeout_s, *task))
        running.add(job)  # the loop keeps weak references only
        job.add_done_callback(running.discard)


async def _score_async(
    pipes: _Pipes, function: RewardFunction, timeout_s: float, task_id: int, payload: bytes
) -> None:
    start = time.perf_counter()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            result = await function(**dict(zip(ARGUMENTS, pickle.loads(payload), strict=True)))
        outcome = (read_score(result), "", "")
    except asyncio.CancelledError:
        raise
    except BaseException:
        failure = "timeout" if limit.expired() else "error"
        outcome = (0.0, failure, traceback.format_exc())
    pipes.send(task_id, *outcome, time.perf_counter() - start)


def _outlive_signals() -> None:
    """Stay when the job is told to stop: the trainer decides when scoring ends, by closing the pipe.

    A handler that does nothing, not SIG_IGN: programs that a reward function starts would inherit that and
    could not be terminated. The owner blocked both signals until this point.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _explain_load_failure(error: BaseException) -> str:
    if isinstance(error, ValueError) and error.__cause__ is None:
        return str(error)  # says it all
    return "".join(traceback.format_exception(error))
