"""Scores responses in worker processes while the trainer decodes. Called by the rollout worker of each rank.

`submit` each response as it ends, `collect` once for each batch. The trainer never runs a reward function itself,
so one that hangs, leaks or crashes costs a worker, which is replaced, and never the run's other work.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Self

from tlt_megatron.rewards.dispatch import Dispatcher, Outcome
from tlt_megatron.rewards.worker_process import Task, WorkerProcess
from tlt_megatron.types import Prompt

log = logging.getLogger(__name__)

_STOP_POLL_S = 0.2  # seconds between two questions whether to stop waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStats:
    """Counters of a pool since they were last taken."""

    num_scored: int = 0  # responses with a reward, failures that count as 0 included
    num_errors: int = 0  # the function raised, or its worker died
    num_timeouts: int = 0
    score_seconds: float = 0.0  # spent in the reward function, summed over workers
    wait_seconds: float = 0.0  # that `collect` had to wait: what scoring adds to the step


class RewardPool:
    """`num_workers` processes that load `function_spec` (see `reward.load_reward`) at once, in the background.

    `on_error` says what a function that raises, exceeds `timeout_s` or kills its worker means: "raise" makes
    `collect` raise RuntimeError; "zero" makes the reward 0.0, counts it and logs it once for each prompt.
    Example: `with RewardPool("math", num_workers=2, timeout_s=30.0, on_error="raise") as pool: ...`
    """

    def __init__(
        self, function_spec: str, *, num_workers: int, timeout_s: float, on_error: str
    ) -> None:
        if num_workers < 1 or timeout_s <= 0 or on_error not in ("raise", "zero"):
            raise ValueError(
                f"num_workers={num_workers} must be >= 1, timeout_s={timeout_s} > 0, "
                f"on_error={on_error!r} one of raise, zero"
            )
        self._spec = function_spec
        self._on_error = on_error
        self._changed = threading.Condition()  # guards all below
        self._num_submitted = 0
        self._pending: dict[int, tuple[Hashable, str]] = {}  # task_id -> key, prompt_id
        self._keys: set[Hashable] = set()  # of this batch
        self._rewards: dict[Hashable, float] = {}
        self._is_ready = self._is_closed = False
        self._broken: Exception | None = None
        self._logged_prompt_ids: set[str] = set()
        self._stats = _new_counters()
        folder = os.getcwd()  # relative paths mean the same in a worker started later
        self._dispatcher = Dispatcher(
            lambda: WorkerProcess(function_spec, timeout_s, folder),
            num_workers=num_workers,
            timeout_s=timeout_s,
            on_outcome=self._take_outcome,
            on_ready=self._take_ready,
            on_broken=self._take_broken,
        )
        self._dispatcher.start()

    def wait_ready(self) -> None:
        """Return when every worker has loaded the function.

        ValueError says why it cannot be loaded, RuntimeError that a worker died over it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._broken or self._is_closed)
            self._raise_if_unusable()

    def submit(self, rollout_key: Hashable, prompt: Prompt, solution_str: str) -> None:
        """Have a response scored; never waits. ValueError if the batch holds `rollout_key` already."""
        payload = pickle.dumps(
            (prompt.data_source, solution_str, prompt.ground_truth, dict(prompt.extra_info)),
            protocol=pickle.HIGHEST_PROTOCOL,
        )
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the reward pool is closed")
            if rollout_key in self._keys:
                raise ValueError(f"rollout_key={rollout_key!r}: submitted twice in one batch")
            task_id = self._num_submitted
            self._num_submitted += 1
            self._keys.add(rollout_key)
            self._pending[task_id] = (rollout_key, prompt.prompt_id)
        self._dispatcher.put(Task(task_id=task_id, payload=payload))

    def wait_scored(self, should_stop: Callable[[], bool]) -> bool:
        """Wait until `collect` will not; False if `should_stop` says True before that. What is not scored then is dropped
        by `close`."""
        start = time.perf_counter()
        with self._changed:
            while self._pending and not self._broken and not self._is_closed:
                if should_stop():
                    return False
                self._changed.wait(_STOP_POLL_S)
            self._stats["wait_seconds"] += time.perf_counter() - start
        return True

    def collect(self) -> dict[Hashable, float]:
        """Wait for all that was submitted since the last `collect`; the reward of each key, in no special order.

        With on_error="raise", RuntimeError as soon as one failure is known, naming its prompt; the pool can then
        only be closed.
        """
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or self._broken or self._is_closed)
            self._raise_if_unusable()
            self._stats["wait_seconds"] += time.perf_counter() - start
            rewards, self._rewards = self._rewards, {}
            self._keys.clear()
        return rewards

    def take_stats(self) -> RewardStats:
        """The counters since the last call, which starts them anew."""
        with self._changed:
            counters, self._stats = self._stats, _new_counters()
        return RewardStats(**counters)

    def close(self) -> None:
        """End the workers and whatever they started. A second call does nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._dispatcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_if_unusable(self) -> None:
        if self._broken is not None:
            # a fresh one each time: an exception object that is raised twice collects tracebacks
            raise type(self._broken)(*self._broken.args)
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")

    def _take_ready(self) -> None:
        with self._changed:
            self._is_ready = True
            self._changed.notify_all()

    def _take_broken(self, error: Exception) -> None:
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    def _take_outcome(self, outcome: Outcome) -> None:
        with self._changed:
            rollout_key, prompt_id = self._pending.pop(outcome.task_id)
            self._stats["num_scored"] += 1
            self._stats["score_seconds"] += outcome.seconds
            self._rewards[rollout_key] = outcome.score
            if outcome.failure:
                self._take_failure(rollout_key, prompt_id, outcome)
            if not self._pending or self._broken:
                self._changed.notify_all()

    def _take_failure(self, rollout_key: Hashable, prompt_id: str, outcome: Outcome) -> None:
        self._stats["num_timeouts" if outcome.failure == "timeout" else "num_errors"] += 1
        text = (
            f"reward.function={self._spec!r} failed on prompt_id={prompt_id!r} "
            f"(rollout {rollout_key!r}): {outcome.detail.rstrip()}"
        )
        if self._on_error == "raise":
            self._broken = self._broken or RuntimeError(text)
        elif prompt_id not in self._logged_prompt_ids:
            self._logged_prompt_ids.add(prompt_id)
            log.warning("%s\nThe reward is 0 (reward.on_error=zero).", text)


def _new_counters() -> dict[str, float]:
    return dict.fromkeys(RewardStats.__dataclass_fields__, 0)
