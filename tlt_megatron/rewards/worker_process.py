"""The owner's side of one reward worker: a separate program, with a socket for messages and a pipe for its output.

Used by `workers.RewardPool`, in one event loop. The worker is a new program, not a fork: the trainer holds gloo threads, OpenMP
pools and devices, which do not survive a fork. The trainer's `__main__` is not run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tlt_megatron.rewards.reward import read_score

_START_TIMEOUT_S = 300.0  # to import the user's module
_ASYNC_GRACE_S = 2.0  # extra time: an async worker ends its tasks at the timeout by itself
_END_GRACE_S = 1.0  # for a worker that was told to end or has closed its socket
_KILL_TIMEOUT_S = 10.0  # for the keeper to end the tree; only a process in the kernel takes longer
_MAX_MESSAGE_BYTES = 1 << 20  # our worker code sends less; more comes from another writer
# the worker uses the trainer's import path, whether the package is installed or not
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); life, control = map(int, sys.argv[2:4]); "
    "from tlt_megatron.rewards.keeper import keep; keep(life, control); "
    "from tlt_megatron.rewards.worker_main import main; "
    "sys.exit(main(sys.argv[4], float(sys.argv[5]), control))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one response. `failure` is "", "error" or "timeout".

    `is_shared`: the worker ended while it scored several responses, and any of them may be the cause.
    """

    score: float = 0.0
    failure: str = ""
    detail: str = ""  # traceback, timeout or exit status
    seconds: float = 0.0  # in the reward function
    is_shared: bool = False


class _OutputPipe(asyncio.Protocol):
    """Reads what the worker and its programs print, until the last of them has ended."""

    def __init__(self, on_output: Callable[[bytes], None]) -> None:
        self.data_received = on_output  # type: ignore[method-assign]
        self.has_ended = asyncio.Event()

    def connection_lost(self, _: Exception | None) -> None:
        self.has_ended.set()


class WorkerProcess(asyncio.Protocol):
    """Starts at construction, inside a running event loop. Call `load`, then `score` as often as needed, then `close`."""

    def __init__(
        self, spec: str, timeout_s: float, folder: str, on_output: Callable[[bytes], None]
    ) -> None:
        self.spec = spec
        self.is_async = False
        self._transport: asyncio.Transport | None = None
        self._ending: asyncio.Task[None] | None = None
        self._timeout_s = timeout_s
        self._output = _OutputPipe(on_output)
        self._answers: dict[int, asyncio.Future[Outcome]] = {}
        self._is_loaded = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()
        life_read_fd, self._life_fd = os.pipe()
        self._output_fd, output_write_fd = os.pipe()
        self._socket, theirs = socket.socketpair()
        fds = [life_read_fd, theirs.fileno()]
        path = json.dumps([str(entry) for entry in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM, path, *map(str, fds), spec, repr(timeout_s)],
                stdin=subprocess.DEVNULL,
                stdout=output_write_fd,
                stderr=output_write_fd,
                pass_fds=fds,
                cwd=folder,
                start_new_session=True,  # a function that signals its process group must not reach the trainer
            )
        finally:
            os.close(life_read_fd)
            os.close(output_write_fd)
            theirs.close()

    @property
    def is_lost(self) -> bool:
        """Return whether the worker has ended or is being ended. It takes no more responses."""
        return self._ending is not None

    async def load(self) -> None:
        """Return when the function is loaded. ValueError if it cannot be loaded, RuntimeError if loading ended the worker."""
        loop = asyncio.get_running_loop()
        output = os.fdopen(self._output_fd, "rb")
        await loop.connect_read_pipe(lambda: self._output, output)
        self._transport, _ = await loop.create_connection(lambda: self, sock=self._socket)
        await asyncio.wait([self._is_loaded], timeout=_START_TIMEOUT_S)
        if not self._is_loaded.done():
            await asyncio.shield(self._end("timeout", f"not loaded within {_START_TIMEOUT_S} s"))
        failure = await self._is_loaded
        if failure is not None:
            raise failure

    async def score(self, task: int, line: bytes) -> Outcome:
        """Score one response. A worker that is late is ended and takes no more."""
        assert self._transport is not None
        answer = self._answers[task] = asyncio.get_running_loop().create_future()
        self._transport.write(line)
        # `wait` reports answers that came in time, even if this thread resumed after the deadline
        await asyncio.wait([answer], timeout=self._timeout_s + _ASYNC_GRACE_S * self.is_async)
        if not answer.done():
            why = f"no score within timeout_s={self._timeout_s}"
            await asyncio.shield(self._end("timeout", why))
        return await answer

    async def close(self) -> None:
        """End the worker and every process it started. An idle worker ends by itself."""
        if self._transport is not None:
            self._transport.close()
        await self._end("error", "the reward pool was closed", grace_s=_END_GRACE_S)

    def data_received(self, data: bytes) -> None:
        """Handle messages of the worker (asyncio.Protocol)."""
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        try:
            if len(rest) > _MAX_MESSAGE_BYTES:
                raise ValueError(f"{len(rest)} bytes without an end")
            for line in lines:
                self._take_message(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"something else than a score was written to the worker's socket: {error!r}"
            self._end("error", why)
            if self._transport is not None:
                self._transport.abort()  # nothing more is read

    def connection_lost(self, _: Exception | None) -> None:
        """Handle a closed socket: the worker has ended, or the function closed it (asyncio.Protocol)."""
        self._end("error", "", grace_s=_END_GRACE_S)

    def _take_message(self, message: dict) -> None:
        if self._is_loaded.done():
            task, score = message.pop("task"), read_score(message.pop("score", 0.0))
            outcome = Outcome(score=score, **message)
            self._answers.pop(task).set_result(outcome)
        elif "failed" in message:
            self._is_loaded.set_result(ValueError(message["failed"]))
        else:
            self.is_async = bool(message["is_async"])
            self._is_loaded.set_result(None)

    def _end(self, failure: str, detail: str, grace_s: float = 0.0) -> asyncio.Task[None]:
        """End the process tree, after `grace_s` if it does not end by itself. Then fail all pending answers.

        Without `detail`, the exit status is reported. The first call decides. Await the task to wait until the processes are
        gone.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_processes(failure, detail, grace_s))
        return self._ending

    async def _end_processes(self, failure: str, detail: str, grace_s: float) -> None:
        status = await self._wait_end(grace_s) if grace_s else None
        os.close(self._life_fd)
        if await self._wait_end(_KILL_TIMEOUT_S) is None:
            self._process.kill()
        with contextlib.suppress(TimeoutError):  # the last output
            await asyncio.wait_for(self._output.has_ended.wait(), _END_GRACE_S)
        if not detail and status is None:
            detail = "the reward function closed the worker's socket"
        detail = detail or f"the worker process ended with {_describe_status(status)}"
        if not self._is_loaded.done():
            error = RuntimeError(f"reward.function={self.spec!r}: {detail} while it loaded")
            self._is_loaded.set_result(error)
        answers, self._answers = self._answers, {}
        outcome = Outcome(failure=failure, detail=detail, is_shared=len(answers) > 1)
        for answer in answers.values():
            if not answer.done():
                answer.set_result(outcome)

    async def _wait_end(self, timeout_s: float) -> int | None:
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return None


def _describe_status(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exit status {status}"
    hint = " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-status).name}{hint}"
