"""The program of a reward worker. It loads the functions and calls them until the trainer closes
the socket.

Messages are JSON lines over a socket on a high descriptor, which a function is unlikely to print to
or close. In: {"task", "function", "timeout_s", "arguments"}. The function is "reward",
"environment" (one that is a function), or "start", "step" or "end" of an environment with state.
Out: the fields of `worker_process.Loaded` or {"failed"}, then for each task its number and the
fields of `worker_process.Outcome` that are not their default. The main thread runs the function,
because functions may use signals (math-verify does). An error on the socket ends the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tlt_megatron.config.extensions import load_extension
from tlt_megatron.rewards.environment_answer import Environments, make_answer, read_answer
from tlt_megatron.rewards.reward import ENVIRONMENT, WeightedRewards, is_async, name_setting
from tlt_megatron.rewards.worker_process import ToolUseSpec, name_environment
from tlt_megatron.runtime.stop import SIGNALS

_HIGH_FD = 1000  # above the range that a function may close, below the usual limit of 1024
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
        # Escapes of text would exceed the limit of a message, which counts its bytes. A traceback
        # may have half of a surrogate pair.
        text = json.dumps(message, ensure_ascii=False)
        data = memoryview(text.encode(errors="surrogatepass") + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]


class _Functions:
    """The functions of a run: rewards, and the environment if there is one."""

    def __init__(self, weights: dict[str, float], environment: str | ToolUseSpec) -> None:
        self._rewards = WeightedRewards(weights)
        own = _load_environment(environment)
        self._environment = own
        has_instances = inspect.isclass(own)
        if ENVIRONMENT in weights and not has_instances:
            raise ValueError(
                f"reward.function={ENVIRONMENT}: needs an environment that is a class, and {name_environment(environment)}"
                " is a function, which gives no rewards"
            )
        named = {name: getattr(own, name, None) for name in ("start", "step", "end")}
        named["environment"] = own
        self._environments = Environments(own) if has_instances else None
        tools = getattr(own, "tools", ()) if has_instances else ()
        try:  # a property is known when there is an instance
            tools = make_answer((), tools=() if isinstance(tools, property) else tools).tools
        except ValueError as error:
            raise ValueError(f"{name_environment(environment)}: {error}") from error
        self.loaded = {
            "async_functions": [name for name, each in named.items() if is_async(each)]
            + ["reward"] * self._rewards.is_async,
            "has_instances": has_instances,
            "tools": tools,
        }

    async def call(self, task: dict) -> dict[str, object]:
        """Return the result of a task, as fields of `worker_process.Outcome`.

        It waits only for async functions.
        """
        function, arguments = task["function"], task["arguments"]
        if function == "reward":
            score, details = await self._rewards.score(**arguments)
            return {"score": score, "details": details}
        if self._environments is not None:
            return await self._environments.call(function, **arguments)
        assert self._environment is not None
        result = self._environment(**arguments)
        return {
            "answer": asdict(read_answer(await result if inspect.isawaitable(result) else result))
        }


def _load_environment(environment: str | ToolUseSpec) -> Callable[..., Any] | None:
    if isinstance(environment, str):
        return load_extension("rollout.environment", environment) if environment else None
    from tlt_megatron.rewards.tool_set import make_tool_use

    return make_tool_use(environment)


def main(weights: dict[str, float], environment: str | ToolUseSpec, control_fd: int) -> None:
    """Run tasks until the socket closes. Exit status 1 if a function cannot be loaded."""
    _outlive_signals()
    channel = _Channel(control_fd)
    try:
        functions = _Functions(weights, environment)
    except BaseException as error:  # also SystemExit: a user's module may raise anything
        traceback.print_exception(error)  # to the rank's log; the terminal gets one line
        is_named = isinstance(error, ValueError)
        line = str(error) if is_named else f"{name_setting(weights)} fails to load: {error!r}"
        channel.send(failed=line[-_MAX_DETAIL:])
        sys.exit(1)
    channel.send(**functions.loaded)
    if functions.loaded["async_functions"]:
        asyncio.run(_serve_async(channel, functions))
    else:
        _serve(channel, functions)


def _serve(channel: _Channel, functions: _Functions) -> None:
    """Run one task after another, outside of an event loop: a function may start its own."""
    while (task := channel.receive()) is not None:
        start = time.perf_counter()
        try:
            functions.call(task).send(None)
            raise TypeError("the function returns an awaitable: it must be declared async")
        except StopIteration as end:
            fields = end.value
        except BaseException as error:  # a function that calls exit() must not end the worker
            fields = _failure("error", error)
        channel.send(task=task["task"], seconds=time.perf_counter() - start, **fields)


async def _serve_async(channel: _Channel, functions: _Functions) -> None:
    running: set[asyncio.Task[None]] = set()
    while (task := await asyncio.to_thread(channel.receive)) is not None:
        job = asyncio.create_task(_call_async(channel, functions, task))
        running.add(job)  # the loop keeps weak references only
        job.add_done_callback(running.discard)


async def _call_async(channel: _Channel, functions: _Functions, task: dict) -> None:
    start = time.perf_counter()
    limit = asyncio.timeout(task["timeout_s"])
    try:
        async with limit:
            fields = await functions.call(task)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        fields = _failure("timeout" if limit.expired() else "error", error)
    channel.send(task=task["task"], seconds=time.perf_counter() - start, **fields)


def _failure(kind: str, error: BaseException) -> dict[str, object]:
    detail = "".join(traceback.format_exception(error))[-_MAX_DETAIL:]
    return {"failure": kind, "detail": detail}


def _outlive_signals() -> None:
    """Do nothing at signals to stop: the trainer decides when scoring ends, by closing the socket.

    SIG_IGN and blocked signals would be inherited by programs that a reward function starts, and
    they could not be terminated. The trainer blocked these signals until this point.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
