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
from collections import defaultdict
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from tlt_megatron.rewards.environment import Turn
from tlt_megatron.rewards.environment_answer import Answer
from tlt_megatron.rewards.reward import ENVIRONMENT, name_setting
from tlt_megatron.rewards.worker_process import (
    Loaded,
    Outcome,
    ToolUseSpec,
    WorkerProcess,
    name_environment,
)
from tlt_megatron.rewards.worker_seats import Seat, WorkerSeats
from tlt_megatron.runtime.log import encodable
from tlt_megatron.runtime.stop import SIGNALS
from tlt_megatron.types import Message, Prompt, Transcript

log = logging.getLogger(__name__)
# Not one of our loggers: a user's prints belong in the rank's log file, not on the terminal
output_log = logging.getLogger("reward_output")

MAX_OUTPUT_BYTES = 1 << 16  # logged output of a rank's reward functions between two `collect`
_STOP_POLL_S = 0.2  # between two calls of `should_stop`
_NOT_REPEATABLE = (
    "it answered in another way when its worker had ended and another one repeated the conversation:"
    " what it does may depend on the row, the seed and the turns alone"
)


@dataclass(slots=True, eq=False, kw_only=True)
class HostedConversation:
    """A conversation whose environment is an instance in one worker."""

    number: int  # unique in the pool
    prompt: Prompt
    sample_index: int
    seat: Seat | None = None
    worker: WorkerProcess | None = None  # that has the instance
    is_alone: bool = False  # two workers ended during its calls
    # the start and the turns so far, with the answers: another worker can repeat them
    calls: list[tuple[str, Mapping[str, object], Answer]] = field(default_factory=list)

    def name(self, function: str) -> str:
        """Return the place of the next call, for messages."""
        if function == "step":
            return _name_turn(self.prompt, self.sample_index, len(self.calls))
        return f"{function} of rollout {(self.prompt.draw_index, self.sample_index)!r}"


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
        environment: str | ToolUseSpec = "",
    ) -> None:
        weights = {functions: 1.0} if isinstance(functions, str) else dict(functions)
        self.weights = weights
        self._num_opened = 0  # conversations
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

    def submit(
        self,
        rollout_key: Hashable,
        prompt: Prompt,
        solution_str: str,
        talk: Transcript | None = None,
    ) -> None:
        """Submit a response for scoring; never waits. No two of a batch have the same key. `talk`
        has the rewards of an environment.

        The function gets `extra_info` as JSON: keys are text, bytes are base64, other types unknown
        to JSON (dates, decimals) are their `str`.
        """
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        assert rollout_key not in self._batch
        own = {"turn_rewards": talk.turn_rewards, "end": dict(talk.end)} if talk else {}
        arguments = _arguments(prompt, solution_str=solution_str, environment=own)
        work = self._workers.run("reward", arguments, prompt.prompt_id, f"rollout {rollout_key!r}")
        self._batch[rollout_key] = self._call(work)

    @property
    def environment_weight(self) -> float:
        """Return the weight of an environment's rewards."""
        return self.weights.get(ENVIRONMENT, 0.0)

    def weight_metrics(self) -> dict[str, float]:
        """Return the weight of each of several functions."""
        names = {spec.rpartition(":")[2]: weight for spec, weight in self.weights.items()}
        return (
            {f"reward/weight/{name}": weight for name, weight in names.items()}
            if len(names) > 1
            else {}
        )

    @property
    def environment(self) -> Loaded:
        """Return what the environment is, when `wait_ready` has returned."""
        return self._workers.loaded

    def take_repeated(self) -> int:
        """Return the conversations that were repeated since the last call."""
        return self._workers.take_repeated()

    def open(self, prompt: Prompt, sample_index: int) -> HostedConversation:
        """Return a conversation with an environment that is a class."""
        self._num_opened += 1
        return HostedConversation(number=self._num_opened, prompt=prompt, sample_index=sample_index)

    def start(
        self, talk: HostedConversation, seed: int, policy: Mapping[str, object] | None = None
    ) -> Future[Outcome]:
        """Ask the environment for its messages and tools, as `answer` does. `policy` says how its
        turns are drawn.
        """
        row = _arguments(talk.prompt, messages=list(talk.prompt.messages), policy=policy or {})
        return self._ask(self._workers.ask(talk, "start", {"row": row, "seed": seed}))

    def step(self, talk: HostedConversation, turn: Turn) -> Future[Outcome]:
        """Ask the environment for its answer to a turn, as `answer` does."""
        return self._ask(self._workers.ask(talk, "step", asdict(turn)))

    def end(self, talk: HostedConversation) -> Future[Outcome]:
        """Ask the environment for the reward of its end, which is the score of the outcome."""
        return self._ask(self._workers.ask(talk, "end", {}))

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
        return self._ask(self._workers.run("environment", arguments, prompt.prompt_id, where))

    def _ask(self, work: Coroutine[Any, Any, Outcome]) -> Future[Outcome]:
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
        self,
        weights: Mapping[str, float],
        environment: str | ToolUseSpec,
        timeout_s: float,
        *,
        is_fatal: bool,
    ) -> None:
        reward = name_setting(weights)
        other = name_environment(environment)
        # that name the functions, for messages
        self._settings = defaultdict(lambda: other, reward=reward)
        self._timeout_s = timeout_s  # for one call
        self._is_fatal = is_fatal  # a failure raises RuntimeError
        self._logged_prompt_ids: set[str] = set()
        self._num_output_bytes = 0  # since the last `collect`
        folder = os.getcwd()  # relative paths mean the same in a worker started later
        self._seats = WorkerSeats(
            lambda: WorkerProcess(weights, environment, folder, self._log_output)
        )
        self.loaded = Loaded()
        self._num_repeated = (
            0  # conversations whose worker ended, so that another one repeated them
        )

    async def start(self, num_workers: int) -> None:
        self.loaded = (await self._seats.open(num_workers)).loaded

    async def run(
        self, function: str, arguments: Mapping[str, object], prompt_id: str, where: str
    ) -> Outcome:
        """Return the outcome of one call."""
        call = function, arguments, self._timeout_s
        async with self._seats.room() as seat:
            outcome = await (await self._seats.worker_of(seat)).call(*call)
        if outcome.is_shared:  # any of several may have ended the worker
            async with self._seats.room(self._seats.alone) as seat:
                outcome = await (await self._seats.worker_of(seat)).call(*call)
        if outcome.failure:
            await self.report(function, prompt_id, where, outcome.detail.rstrip())
        return outcome

    async def ask(
        self, talk: HostedConversation, function: str, arguments: Mapping[str, object]
    ) -> Outcome:
        """Return the outcome of `start`, `step` or `end` of a conversation's environment.

        If its worker ends, another one repeats the conversation. If that one ends too, the
        conversation is repeated alone, and stays alone. If it ends its worker once more, it is to
        blame.
        """
        outcome = await self._ask_once(talk, function, arguments)
        for is_alone in (False, True):
            if talk.is_alone or not outcome.may_be_of_another:
                break
            talk.is_alone = is_alone
            outcome = await self._ask_once(talk, function, arguments)
        if outcome.failure:
            why = outcome.detail.rstrip()
            await self.report(function, talk.prompt.prompt_id, talk.name(function), why)
        elif outcome.answer is not None:
            talk.calls.append((function, arguments, outcome.answer))
        return outcome

    async def _ask_once(
        self, talk: HostedConversation, function: str, arguments: Mapping[str, object]
    ) -> Outcome:
        is_there = talk.seat is not None and talk.worker is talk.seat.worker
        seat = self._seats.alone if talk.is_alone else talk.seat if is_there else None
        async with self._seats.room(seat) as seat:
            worker = await self._seats.worker_of(seat)
            if worker is not talk.worker:
                self._num_repeated += bool(talk.calls)
                talk.worker, talk.seat = worker, seat
                for past_function, past, answer in talk.calls:
                    call = past_function, {"conversation": talk.number, "arguments": past}
                    outcome = await worker.call(*call, self._timeout_s)
                    if outcome.failure:
                        return outcome
                    if outcome.answer != answer:
                        return Outcome(failure="error", detail=_NOT_REPEATABLE)
            call = function, {"conversation": talk.number, "arguments": arguments}
            return await worker.call(*call, self._timeout_s)

    def take_repeated(self) -> int:
        """See `RewardPool.take_repeated`."""
        count, self._num_repeated = self._num_repeated, 0
        return count

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
        await self._seats.close()
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


def _name_turn(prompt: Prompt, sample_index: int, turn: int) -> str:
    return f"turn {turn} of rollout {(prompt.draw_index, sample_index)!r}"


def _arguments(prompt: Prompt, **further: object) -> dict[str, object]:
    return {
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        **further,
    }
