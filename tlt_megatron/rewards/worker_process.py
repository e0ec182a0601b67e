"""The pool's end of one reward worker: a separate program, with a socket for messages and a pipe
for its output.

Used by `workers.RewardPool`, in one event loop. The worker is a new program, not a fork: the
trainer holds gloo threads, OpenMP pools and devices, which do not survive a fork. The trainer's
`__main__` is not run again. Its parent is `worker_keeper.keep`, which ends all of the worker's
programs when the worker ends.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import IO, TypedDict

from tlt_megatron.rewards.environment_answer import Answer, make_answer
from tlt_megatron.rewards.reward import name_setting, read_result
from tlt_megatron.runtime.environment_variables import with_defaults

_START_TIMEOUT_S = 300.0  # to import the user's module
_ASYNC_GRACE_S = 2.0  # extra time: an async worker ends its tasks at the timeout by itself
_END_GRACE_S = 1.0  # for a worker that was told to end
_STATUS_TIMEOUT_S = 5.0  # after a worker closed its socket: for its exit status and its last output
_KILL_TIMEOUT_S = 10.0  # to end after SIGKILL; only a process in the kernel takes longer
_MAX_MESSAGE_BYTES = 1 << 20  # our worker code sends less; more comes from another writer
# The worker uses the trainer's import path, whether the package is installed or not.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tlt_megatron.rewards.worker_keeper import keep; keep(int(sys.argv[4])); "
    "from tlt_megatron.rewards.worker_main import main; "
    "main(json.loads(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))"
)


# Sets of texts have the same order in all workers, so that one may repeat what another has done.
_VARIABLES = {"PYTHONHASHSEED": "0"}


class ToolUseSpec(TypedDict):
    """Tools in place of an environment."""

    tools: list[str]  # rollout.tools
    errors: str  # rollout.tool_errors
    timeout_s: float  # of a turn, for those that have limits of their own


def name_environment(environment: str | ToolUseSpec) -> str:
    """Return the setting that names what answers the turns, with its value."""
    if isinstance(environment, str):
        return f"rollout.environment={environment!r}"
    return f"rollout.tools={environment['tools']!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one call: the reward of a response, or the answer to a turn. `failure` is "",
    "error" or "timeout".

    `is_lost`: the worker ended during this call. `is_shared`: it ended during several, and any of
    them may be the cause.
    """

    score: float = 0.0
    details: dict[str, float] = field(default_factory=dict)  # further numbers of the functions
    failure: str = ""
    detail: str = ""  # traceback, timeout or exit status
    seconds: float = 0.0  # in the function
    answer: Answer | None = None  # the environment's
    is_lost: bool = False
    is_shared: bool = False

    @property
    def may_be_of_another(self) -> bool:
        """Return whether another call, or another conversation of its worker, may have caused the
        failure.
        """
        return self.is_lost and (self.is_shared or self.failure != "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the functions of a worker are."""

    async_functions: Sequence[str] = ()  # of which it may run many calls at once
    has_instances: bool = False  # the environment is a class
    tools: Sequence[Mapping[str, object]] = ()  # of that class

    @property
    def is_async(self) -> bool:
        """Return whether it runs many calls at once. A function that is not async holds them."""
        return bool(self.async_functions)


class WorkerProcess:
    """Starts at construction, inside a running event loop.

    Await `load`, then `call` as often as needed, then `close`.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        environment: str | ToolUseSpec,
        folder: str,
        on_output: Callable[[bytes], None],
    ) -> None:
        self.loaded = Loaded()
        self._weights = dict(weights)
        self._num_tasks = 0
        self._answers: dict[int, asyncio.Future[Outcome]] = {}
        self._turn_to_block = asyncio.Lock()
        self._loading: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._end_reason: tuple[str, str, float] | None = None  # failure, detail, grace in seconds
        ours, theirs = socket.socketpair()
        texts = map(json.dumps, ([str(entry) for entry in sys.path], self._weights, environment))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM, *texts, str(theirs.fileno())],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                cwd=folder,
                env=with_defaults(_VARIABLES),
                start_new_session=True,
            )
        self._exited = asyncio.create_task(_wait_exit(self._process))
        self._reading = asyncio.create_task(self._read_messages(ours))
        self._life = asyncio.create_task(self._live(on_output))

    @property
    def is_lost(self) -> bool:
        """Return whether the worker has ended or is being ended. It takes no more responses."""
        return self._end_reason is not None or self._reading.done() or self._exited.done()

    async def load(self) -> None:
        """Return when the function is loaded.

        ValueError if it cannot be loaded, RuntimeError if loading ended the worker.
        """
        await asyncio.wait([self._loading], timeout=_START_TIMEOUT_S)
        if not self._loading.done():
            self._end("timeout", f"not loaded within {_START_TIMEOUT_S} s")
        failure = await self._loading
        if failure is not None:
            raise failure

    async def call(
        self, function: str, arguments: Mapping[str, object], timeout_s: float
    ) -> Outcome:
        """Call a function (see `worker_main`). A worker that is late is ended and takes no more."""
        self._num_tasks += 1
        answer = self._answers[self._num_tasks] = asyncio.get_running_loop().create_future()
        task = {"task": self._num_tasks, "function": function, "timeout_s": timeout_s}
        message = json.dumps({**task, "arguments": arguments}, default=_as_text)
        # A call that blocks waits here for others, so that it does not use up its time there.
        is_blocking = self.loaded.is_async and function not in self.loaded.async_functions
        async with self._turn_to_block if is_blocking else nullcontext():
            if not answer.done():  # the worker has not ended
                self._writer.write(message.encode() + b"\n")
                limit = timeout_s + _ASYNC_GRACE_S * self.loaded.is_async
                # `wait` reports answers in time, even if this thread resumed after the deadline.
                await asyncio.wait([answer], timeout=limit)
            if not answer.done():
                what = "score" if function == "reward" else "answer"
                self._end("timeout", f"no {what} within timeout_s={timeout_s}")
        return await answer

    async def close(self) -> None:
        """End the worker and every process it started. An idle worker ends by itself."""
        self._end("error", "the reward pool was closed", grace_s=_END_GRACE_S)
        await self._life

    def _end(self, failure: str, detail: str, grace_s: float = 0.0) -> None:
        """Begin to end the process tree, after `grace_s` if it does not end by itself.

        The first call decides.
        """
        if self._end_reason is None:
            self._end_reason = failure, detail, grace_s
            self._reading.cancel()

    async def _read_messages(self, connection: socket.socket) -> None:
        """Take messages until the worker closes its socket, sends something else or is to be
        ended.
        """
        reader, self._writer = await asyncio.open_connection(
            sock=connection, limit=_MAX_MESSAGE_BYTES
        )
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                self._take_message(json.loads(line))
        except ConnectionError:  # closed with messages unread
            pass
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"something else than a score was written to the worker's socket: {error!r}"
            self._end_reason = self._end_reason or ("error", why, 0.0)
        finally:
            self._writer.transport.abort()

    def _take_message(self, message: dict) -> None:
        if self._loading.done():
            task = message.pop("task")
            score, _ = read_result(message.pop("score", 0.0))
            if "answer" in message:
                message["answer"] = make_answer(**message["answer"])
            outcome = Outcome(score=score, **message)
            answer = self._answers.pop(task)
            if not answer.done():  # cancelled by the pool's end
                answer.set_result(outcome)
        elif "failed" in message:
            self._loading.set_result(ValueError(message["failed"]))
        else:
            self.loaded = Loaded(**message)
            self._loading.set_result(None)

    async def _live(self, on_output: Callable[[bytes], None]) -> None:
        """Wait until the worker ends or is to be ended.

        Then end its process tree and fail all pending answers.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = asyncio.create_task(_forward(self._process.stdout, on_output))
        await asyncio.wait([self._reading, self._exited], return_when=asyncio.FIRST_COMPLETED)
        grace_s = self._end_reason[2] if self._end_reason else _STATUS_TIMEOUT_S
        await asyncio.wait([self._exited], timeout=grace_s)
        has_ended = self._exited.done()
        with suppress(BrokenPipeError):  # nothing is left
            self._process.stdin.write(b"!")  # see `worker_keeper`
        await asyncio.wait([self._exited, self._reading], timeout=_KILL_TIMEOUT_S)
        self._process.stdin.close()
        await asyncio.wait([output], timeout=_STATUS_TIMEOUT_S)
        output.cancel()
        ended = (
            f"the worker process ended with {_describe_status(self._process.returncode)}"
            if has_ended
            else "the reward function closed the worker's socket"
        )
        failure, detail, _ = self._end_reason or ("error", ended, 0.0)
        if not self._loading.done():
            text = f"{name_setting(self._weights)}: {detail} while it loaded"
            self._loading.set_result(RuntimeError(text))
        pending = [answer for answer in self._answers.values() if not answer.done()]
        is_shared = len(self._answers) > 1
        outcome = Outcome(failure=failure, detail=detail, is_lost=True, is_shared=is_shared)
        for answer in pending:
            answer.set_result(outcome)


def _as_text(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


async def _wait_exit(process: subprocess.Popen[bytes]) -> None:
    """Return when the process has ended.

    A process that it left does not delay this, unlike an end of file.
    """
    loop = asyncio.get_running_loop()
    descriptor, has_ended = os.pidfd_open(process.pid), asyncio.Event()
    loop.add_reader(descriptor, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()


async def _forward(pipe: IO[bytes], on_output: Callable[[bytes], None]) -> None:
    """Pass on what the worker and its programs print, until the last of them has ended."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    while data := await reader.read(1 << 16):
        on_output(data)


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    hint = " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-status).name}{hint}"
