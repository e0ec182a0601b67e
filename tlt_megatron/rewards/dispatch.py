"""The thread between the trainer and its reward workers: hands out tasks, reads scores, replaces what hangs or dies.

Used by `workers.RewardPool`. It sleeps in `select` while nothing happens, and it alone touches the workers. A task
that ends its worker is told apart from those that were merely there: those run again, one at a time if need be.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tlt_megatron.rewards.worker_process import Task, WorkerProcess

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 300.0  # to import the user's module
_ASYNC_GRACE_S = 2.0  # an async worker ends its tasks at the timeout by itself
_CLOSE_GRACE_S = 1.0
_WAKE_BYTES = 1 << 16
_ASYNC_IN_FLIGHT = 64  # responses that one worker of an async function scores at once
_MAX_QUEUED = 32  # responses that wait inside a worker of a sync function ...
_QUEUED_SECONDS = 0.02  # ... and the work they stand for: enough to never starve, little to redo


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a task. `failure` is "", "error" or "timeout"."""

    task_id: int
    score: float
    failure: str = ""
    detail: str = ""  # traceback, timeout or exit status
    seconds: float = 0.0  # in the reward function


class Dispatcher(threading.Thread):
    """Runs from `start` to `close`. The callbacks are called from this thread and must not block.

    `on_outcome` comes once for each task, `on_ready` when all workers can score, `on_broken` with the exception
    after which no task will be scored any more.
    """

    def __init__(
        self,
        start_worker: Callable[[], WorkerProcess],
        *,
        num_workers: int,
        timeout_s: float,
        on_outcome: Callable[[Outcome], None],
        on_ready: Callable[[], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        super().__init__(name="reward-dispatcher", daemon=True)
        self._start_worker = start_worker
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._on_outcome, self._on_ready, self._on_broken = on_outcome, on_ready, on_broken
        self._inbox: deque[Task] = deque()  # filled by other threads
        self._queue: deque[Task] = deque()
        self._workers: list[WorkerProcess] = []
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        os.set_blocking(self._wake_read_fd, False)
        os.set_blocking(self._wake_write_fd, False)

    def put(self, task: Task) -> None:
        """Add a task; never blocks. May be called from any thread."""
        self._inbox.append(task)
        self._wake()

    def close(self) -> None:
        """End all workers and this thread. Tasks without an outcome are dropped."""
        self._is_closing = True
        self._wake()
        self.join()
        os.close(self._wake_read_fd)
        os.close(self._wake_write_fd)

    def run(self) -> None:
        """The thread's body."""
        # workers inherit the mask, so that no signal ends one before its handlers stand
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        self._selector.register(self._wake_read_fd, selectors.EVENT_READ)
        try:
            for _ in range(self._num_workers):
                self._add_worker()
            while not self._is_closing:
                self._take_turn()
        except Exception as error:  # of whatever type: the pool's owner raises it
            log.exception("the dispatcher of reward workers has failed")
            self._on_broken(error)
        finally:
            self._end_workers()
            self._selector.close()

    def _take_turn(self) -> None:
        self._queue.extend(self._inbox.popleft() for _ in range(len(self._inbox)))
        self._assign()
        # a worker is late only where select, called after its deadline, has nothing from it: this thread may
        # have been kept from running for long itself
        now = time.monotonic()
        deadlines = [(worker, self._deadline(worker)) for worker in self._workers]
        wait_s = min(deadline for _, deadline in deadlines) - now
        events = self._selector.select(None if math.isinf(wait_s) else max(0.0, wait_s))
        heard: list[WorkerProcess] = []
        for key, mask in events:
            if key.data is None:
                os.read(self._wake_read_fd, _WAKE_BYTES)
            elif mask & selectors.EVENT_READ:
                heard.append(key.data)
            else:
                self._flush(key.data)
        for worker in heard:
            self._hear(worker)
        for worker, deadline in deadlines:
            if deadline <= now and worker not in heard:
                self._expire(worker)

    def _assign(self) -> None:
        while self._queue:
            task = self._queue[0]
            free = [w for w in self._workers if w.is_ready and len(w.in_flight) < _room(w, task)]
            if not free:
                return
            worker = min(free, key=lambda w: len(w.in_flight))
            worker.send(self._queue.popleft())
            self._flush(worker)

    def _flush(self, worker: WorkerProcess) -> None:
        worker.flush()
        is_watched = worker.write_fd in self._selector.get_map()
        if worker.has_unsent and not is_watched:
            self._selector.register(worker.write_fd, selectors.EVENT_WRITE, worker)
        elif is_watched and not worker.has_unsent:
            self._selector.unregister(worker.write_fd)

    def _deadline(self, worker: WorkerProcess) -> float:
        if not worker.is_ready:
            return worker.started_at + _START_TIMEOUT_S
        if not worker.in_flight:
            return math.inf
        oldest = next(iter(worker.in_flight.values()))
        return oldest.sent_at + self._timeout_s + (_ASYNC_GRACE_S if worker.is_async else 0.0)

    def _hear(self, worker: WorkerProcess) -> None:
        messages, has_ended = worker.receive()
        for message in messages:
            if worker.is_ready:
                self._finish(worker, *message)
            elif message[0] == "failed":
                raise ValueError(message[1])
            else:
                worker.is_ready, worker.is_async = True, message[1]
                if all(other.is_ready for other in self._workers):
                    self._on_ready()
        if has_ended:
            how = self._remove(worker)
            self._replace(worker, "error", f"the worker process ended with {how}")

    def _finish(
        self,
        worker: WorkerProcess,
        task_id: int,
        score: float,
        failure: str,
        detail: str,
        seconds: float,
    ) -> None:
        del worker.in_flight[task_id]
        if worker.in_flight and not worker.is_async:
            next(iter(worker.in_flight.values())).sent_at = time.monotonic()  # its turn begins now
        mean = seconds if worker.mean_seconds is None else worker.mean_seconds
        worker.mean_seconds = 0.8 * mean + 0.2 * seconds
        self._on_outcome(
            Outcome(task_id=task_id, score=score, failure=failure, detail=detail, seconds=seconds)
        )

    def _expire(self, worker: WorkerProcess) -> None:
        self._remove(worker)
        if not worker.is_ready:
            raise RuntimeError(
                f"reward.function={worker.spec!r}: not loaded within {_START_TIMEOUT_S} s"
            )
        self._replace(worker, "timeout", f"no score within timeout_s={self._timeout_s}")

    def _replace(self, lost: WorkerProcess, failure: str, detail: str) -> None:
        """Put a new worker in the place of one that was removed, and settle what it had in hand."""
        if not lost.is_ready:
            raise RuntimeError(f"reward.function={lost.spec!r}: {detail} while it loaded")
        self._add_worker()
        tasks = list(lost.in_flight.values())
        if not tasks:
            log.warning("reward worker replaced: %s while it had nothing to do", detail)
        elif lost.is_async and len(tasks) > 1:
            for task in tasks:  # any of them may have done it
                task.must_run_alone = True
        else:
            culprit = tasks.pop(0)
            self._on_outcome(
                Outcome(task_id=culprit.task_id, score=0.0, failure=failure, detail=detail)
            )
        self._queue.extendleft(reversed(tasks))

    def _add_worker(self) -> None:
        worker = self._start_worker()
        self._workers.append(worker)
        self._selector.register(worker.read_fd, selectors.EVENT_READ, worker)

    def _remove(self, worker: WorkerProcess) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.read_fd)
        if worker.write_fd in self._selector.get_map():
            self._selector.unregister(worker.write_fd)
        return worker.kill()

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.close_input()
        deadline = time.monotonic() + _CLOSE_GRACE_S
        for worker in self._workers:
            worker.wait_end(deadline)
            worker.kill()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_write_fd, b"\0")


def _room(worker: WorkerProcess, task: Task) -> int:
    """How many tasks `worker` may have in hand if `task` is to be one of them."""
    if task.must_run_alone or any(other.must_run_alone for other in worker.in_flight.values()):
        return 1
    if worker.is_async:
        return _ASYNC_IN_FLIGHT
    if worker.mean_seconds is None:
        return 1
    return min(_MAX_QUEUED, max(1, int(_QUEUED_SECONDS / max(worker.mean_seconds, 1e-6))))
