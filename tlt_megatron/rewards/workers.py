"""Scores responses and answers turns in worker processes while the trainer decodes. Called by the
rollout worker of each rank.

`submit` each response when it ends, and `collect` once per batch; `answer` each turn of a
conversation. The trainer never runs such a function itself. If one hangs, leaks or crashes, only
its worker is lost and replaced. An event loop in a separate thread drives the workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Self

from tlt_megatron.rewards.reward import name_setting
from tlt_megatron.rewards.worker_process import Outcome, WorkerProcess
from tlt_megatron.runtime.log import encodable
from tlt_megatron.runtime.stop import SIGNALS
from tlt_megatron.types import Message, Prompt

log = logging.getLogger(__name__)
# Not one of our loggers: a user's prints belong in the rank's log file, not on the terminal
output_log = logging.getLogger("reward_output")

MAX_OUTPUT_BYTES = 1 << 16  # logged output of a rank's reward functions between two `collect`
_STOP_POLL_S = 0.2  # between two calls of `should_stop`
_ASYNC_SLOTS = 64  # responses that one worker of an async function scores at once


class RewardPool:
    """`num_workers` processes that load the functions in parallel, in the background.

    `functions` is the setting of a function (see `config.extensions`), or the weight of each by
    its setting. `on_error` handles a function that raises, exceeds `timeout_s` or kills its worker.
    "raise" makes `collect` raise RuntimeError. "zero" makes the reward 0.0, counts the failure and
    logs it once for each prompt. Output of the function and its programs goes to the logger
    "reward_output", up to `MAX_OUTPUT_BYTES` per batch. The workers also run the function of
    `environment`, with the same timeout and `on_error`. Example: `with RewardPool("math",
    num_workers=2, timeout_s=30.0, on_error="raise") as pool: ...`
    """

    def __init__(
        self,
        functions: str | Mapping[str, float],
        *,
        num_workers: int,
        timeout_s: float,
        on_error: str,
        environment: str = "",
    ) -> None:
        weights = {functions: 1.0} if isinstance(functions, str) else dict(functions)
        self._batch: dict[Hashable, Future[Outcome]] = {}
        self._turns: list[Future[Outcome]] = []  # being answered
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._workers = _Workers(weights, environment, timeout_s, is_fatal=on_error == "raise")
        self._thread = threading.Thread(target=self._run_loop, name="reward-workers", daemon=True)
        self._thread.start()
        self._loaded = self._call(self._workers.start(num_workers))

    def wait_ready(self) -> None:
        """Return when every worker has loaded the function.

        ValueError if it cannot be loaded, RuntimeError if a worker died while loading it.
        """
        self._wait([self._loaded])

    def submit(self, rollout_key: Hashable, prompt: Prompt, solution_str: str) -> None:
        """Submit a response for scoring; never waits. No two of a batch have the same key.

        The function gets `extra_info` as JSON: keys are text, bytes are base64, other types unknown
        to JSON (dates, decimals) are their `str`.
        """
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        assert rollout_key not in self._batch
        arguments = _arguments(prompt, solution_str=solution_str)
        work = self._workers.run("reward", arguments, prompt.prompt_id, f"rollout {rollout_key!r}")
        self._batch[rollout_key] = self._call(work)

    def answer(
        self, prompt: Prompt, sample_index: int, turn: int, messages: Sequence[Message]
    ) -> Future[Outcome]:
        """Ask the environment for its answer to `messages`, which end with the policy's turn
        `turn`; never waits.

        If the environment fails, the result says how, or it is a RuntimeError with
        on_error="raise".
        """
        where = _name_turn(prompt, sample_index, turn)
        arguments = _arguments(prompt, messages=list(messages))
        work = self._workers.run("environment", arguments, prompt.prompt_id, where)
        future = self._call(work)
        self._turns = [turn for turn in self._turns if not turn.done()]
        self._turns.append(future)
        return future

    def fail_answer(self, prompt: Prompt, sample_index: int, turn: int, why: str) -> None:
        """Handle an answer that cannot be used like a failure of the environment: log it once for
        each prompt, RuntimeError with on_error="raise".
        """
        where = _name_turn(prompt, sample_index, turn)
        self._call(self._workers.report("environment", prompt.prompt_id, where, why)).result()

    def collect(
        self, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[Hashable, Outcome] | None:
        """Wait for all responses submitted since the last `collect`. Return their outcomes by key.

        Return None if `should_stop` returns True first; `close` then drops what is not scored. With
        on_error="raise", RuntimeError as soon as one failure is known. It names the prompt. The
        pool can then only be closed.
        """
        if not self._wait([self._loaded, *self._batch.values()], should_stop):
            return None
        outcomes = {key: future.result() for key, future in self._batch.items()}
        self._batch = {}
        self._loop.call_soon_threadsafe(self._workers.end_output)
        return outcomes

    def close(self) -> None:
        """End the workers and every process they started. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for future in (self._loaded, *self._batch.values(), *self._turns):
            future.cancel()
        self._call(self._workers.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, futures: list[Future], should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Return True when all are done, False if `should_stop` returns True first. Raise the first
        error.
        """
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        while True:
            done, pending = wait(futures, timeout=_STOP_POLL_S, return_when=FIRST_EXCEPTION)
            for error in filter(None, (future.exception() for future in done)):
                # A new exception each time: raising the same object twice collects tracebacks.
                raise type(error)(*error.args)
            if not pending:
                return True
            if should_stop():
                return False

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run_loop(self) -> None:
        # Workers inherit the mask, so that no signal ends one before its handlers are set.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._loop.run_forever()


class _Workers:
    """The workers of a pool. Only the thread of the pool's event loop calls it."""

    def __init__(
        self, weights: Mapping[str, float], environment: str, timeout_s: float, *, is_fatal: bool
    ) -> None:
        self._functions = weights, environment
        self._settings = {  # that name the functions, for messages
            "reward": name_setting(weights),
            "environment": f"rollout.environment={environment!r}",
        }
        self._timeout_s = timeout_s  # for one call
        self._is_fatal = is_fatal  # a failure raises RuntimeError
        self._folder = os.getcwd()  # relative paths mean the same in a worker started later
        self._logged_prompt_ids: set[str] = set()
        self._num_output_bytes = 0  # since the last `collect`
        self._seats: list[_Seat] = []
        self._free: asyncio.Queue[_Seat] = asyncio.Queue()  # a seat once per response it can take
        self._alone = _Seat()  # rescores responses whose worker ended with several at once
        self._alone_lock = asyncio.Lock()

    async def start(self, num_workers: int) -> None:
        self._seats = [_Seat() for _ in range(num_workers)]
        workers = await asyncio.gather(*map(self._worker_of, self._seats))
        for _ in range(_ASYNC_SLOTS if workers[0].is_async else 1):
            for seat in self._seats:
                self._free.put_nowait(seat)

    async def _worker_of(self, seat: _Seat) -> WorkerProcess:
        """Return the worker in a seat. If the last one has ended, start a new one."""
        async with seat.lock:
            if seat.worker is not None and seat.worker.is_lost:
                await seat.worker.close()
                seat.worker = None
            if seat.worker is None:
                seat.worker = WorkerProcess(*self._functions, self._folder, self._log_output)
                await seat.worker.load()
            return seat.worker

    async def run(
        self, function: str, arguments: Mapping[str, object], prompt_id: str, where: str
    ) -> Outcome:
        """Return the outcome of one call."""
        call = function, arguments, self._timeout_s
        seat = await self._free.get()
        try:
            outcome = await (await self._worker_of(seat)).call(*call)
            if outcome.is_shared:  # any of several may have ended the worker
                async with self._alone_lock:
                    outcome = await (await self._worker_of(self._alone)).call(*call)
        finally:
            self._free.put_nowait(seat)
        if outcome.failure:
            await self.report(function, prompt_id, where, outcome.detail.rstrip())
        return outcome

    async def report(self, function: str, prompt_id: str, where: str, why: str) -> None:
        """Log a failure once for each prompt, or raise RuntimeError if it is fatal."""
        text = f"{self._settings[function]} failed on prompt_id={prompt_id!r} ({where}): {why}"
        text = encodable(text)
        if self._is_fatal:
            raise RuntimeError(text)
        if prompt_id not in self._logged_prompt_ids:
            self._logged_prompt_ids.add(prompt_id)
            log.warning("%s\nThe reward is 0 (reward.on_error=zero).", text)

    async def close(self) -> None:
        workers = [seat.worker for seat in (*self._seats, self._alone)]
        await asyncio.gather(*(worker.close() for worker in workers if worker is not None))
        self.end_output()

    def _log_output(self, data: bytes) -> None:
        """Log what reward functions print, up to `MAX_OUTPUT_BYTES` for each batch."""
        kept = data[: max(0, MAX_OUTPUT_BYTES - self._num_output_bytes)]
        self._num_output_bytes += len(data)
        if text := kept.decode(errors="replace").rstrip():
            output_log.info("%s", text)

    def end_output(self) -> None:
        """Begin the output of the next batch."""
        num_cut, self._num_output_bytes = self._num_output_bytes - MAX_OUTPUT_BYTES, 0
        if num_cut > 0:
            output_log.info(
                "%s: %d more bytes of output of this step were cut",
                *(self._settings["reward"], num_cut),
            )


@dataclass(slots=True, eq=False)
class _Seat:
    """A place for a worker, which may be replaced."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    worker: WorkerProcess | None = None


def _name_turn(prompt: Prompt, sample_index: int, turn: int) -> str:
    return f"turn {turn} of rollout {(prompt.draw_index, sample_index)!r}"


def _arguments(prompt: Prompt, **further: object) -> dict[str, object]:
    return {
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        **further,
    }
