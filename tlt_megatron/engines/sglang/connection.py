"""Starts an `sglang.Engine` within a timeout, waits for its answers, asks it questions and ends it.

SGLang sets environment variables and installs handlers that kill every child of this process. This
module undoes both. If an SGLang process dies, reports a failure or hangs, the wait raises an error.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from tlt_megatron.config.schema import SglangSection
from tlt_megatron.engines.sglang.answers import PREFIX, Question
from tlt_megatron.engines.sglang.processes import EngineProcesses, Silence, ended_if_late, watched
from tlt_megatron.runtime.environment_variables import environment, owned_engine, unless_set

if TYPE_CHECKING:
    from sglang import Engine  # pyright: ignore[reportAttributeAccessIssue]
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

_T = TypeVar("_T")
log = logging.getLogger(__name__)

SGLANG_VERSION = "0.5.23"  # the plugin's hooks fit this release
START_TIMEOUT_S = 1800.0  # covers hundreds of GB of weights from a network disk, and graphs
TARGET, DRAFT = "target", "draft"  # values of SGLang's `selector`: which model's weights


class Connection:
    """One in-process SGLang engine, with our plugin in all of its schedulers."""

    def __init__(
        self,
        arguments: Mapping[str, object],
        section: SglangSection,
        *,
        rank: int,
        is_cpu: bool,
        num_ranks: int,
    ) -> None:
        """Start the engine. ValueError for another release of SGLang. RuntimeError if it does not
        start within START_TIMEOUT_S or the plugin is not loaded."""
        check_version()
        self._timeout_s = section.request_timeout_s
        self._place = f"rank {rank} on {socket.gethostname()}"
        self._probe: asyncio.Future | None = None
        self._processes = EngineProcesses()
        self._contexts_before = WeakSet(_message_contexts())
        self._on_terminate = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        self.engine = self._start(arguments, _environment(is_cpu, num_ranks))
        self._is_closed = False
        atexit.register(self.close)
        try:
            self._check_plugin()
        except RuntimeError:
            self.close()
            raise

    def _start(self, arguments: Mapping[str, object], changes: Mapping[str, str | None]) -> Engine:
        started = time.perf_counter()
        try:
            with environment(changes), ended_if_late(self._processes, START_TIMEOUT_S) as is_late:
                import sglang

                engine = sglang.Engine(  # pyright: ignore[reportAttributeAccessIssue]
                    custom_sigquit_handler=self._processes.complain, **arguments
                )
        except BaseException as error:  # a user's interrupt must clean up too
            log.exception("the sglang engine did not start: its processes are ended")
            self._end()
            if not isinstance(error, Exception):
                raise
            late = f"not up within {START_TIMEOUT_S:g} s"
            reason = late if is_late.is_set() else error
            raise RuntimeError(f"the sglang engine did not start: {reason}") from error
        atexit.unregister(engine.shutdown)
        engine.tokenizer_manager._subprocess_watchdog.stop()
        self._processes.note_started()

        async def open_mailbox() -> None:
            engine.tokenizer_manager.auto_create_handle_loop()

        engine.loop.run_until_complete(open_mailbox())
        self._take_signals(engine.loop)
        log.info("sglang engine is up after %.1f s", time.perf_counter() - started)
        return engine

    def _take_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Replace SGLang's handlers: SIGTERM is the trainer's, and SIGQUIT reports a failure of
        SGLang's processes. Outside the main thread SGLang sets none."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGQUIT):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGQUIT, self._processes.complain)

    def _check_plugin(self) -> None:
        try:
            answers = self.ask(Question.MISSING_HOOKS)
        except RuntimeError as error:
            raise RuntimeError(
                "the plugin tlt_megatron is not loaded in sglang's scheduler: install this package there (pip install -e .),"
                f" and name it if SGLANG_PLUGINS is set ({error})"
            ) from error
        missing = sorted({name for answer in answers for name in answer})
        if missing:
            raise RuntimeError(
                f"sglang has no {', '.join(missing)}: the plugin is for sglang=={SGLANG_VERSION}"
            )

    def run(self, work: Awaitable[_T]) -> _T:
        """Wait for an SGLang coroutine. RuntimeError if an engine process dies or hangs."""
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        manager = self.engine.tokenizer_manager
        silence = Silence(lambda: manager.last_receive_tstamp, self._ask_for_life, self._timeout_s)

        def failure() -> str | None:
            reason = self._processes.failure() or silence.failure()
            if reason is None:
                return None
            return f"{self._place}: the sglang engine is lost: {reason}; its processes: {self._processes.describe()}"

        return self.engine.loop.run_until_complete(watched(work, failure))

    def _ask_for_life(self) -> None:
        """Ask a question that the schedulers answer between two passes. It is never cancelled:
        SGLang would take its late answer for that of the next question."""
        if self._probe is None or self._probe.done():
            request = _check_weights(Question.ALIVE, TARGET, None)
            work = self.engine.tokenizer_manager.check_weights(request, None)
            self._probe = asyncio.ensure_future(work)

    async def abort_all(self) -> None:
        """Abort every running or queued request. Each then answers that it was aborted."""
        self.engine.tokenizer_manager.abort_request(abort_all=True)

    def call(self, method: str, request: object) -> Any:
        """Send a control request to SGLang's tokenizer manager. RuntimeError if it is refused."""
        answer = self.run(getattr(self.engine.tokenizer_manager, method)(request, None))
        if isinstance(answer, tuple) and not answer[0]:
            raise RuntimeError(f"sglang refused {method}: {answer[1]}")
        return answer

    def ask(self, question: Question, *, role: str = TARGET, argument: object = None) -> list[Any]:
        """Return the answers of all scheduler ranks (`answers.Answers`)."""
        request = _check_weights(question, role, argument)
        _, _, ranks, _ = self.call("check_weights", request)
        if ranks is None:
            raise RuntimeError(f"sglang has no {role} to ask for {question}")
        key = question if role == TARGET else f"{role}.{question}"
        return [json.loads(rank["checksums"][key]) for rank in ranks]

    def close(self) -> None:
        """End SGLang's processes and no others."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._end()
        loop = self.engine.loop
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))

    def _end(self) -> None:
        """End the processes and drop messages to them: with open sockets this process could not
        exit."""
        self._processes.end()
        for context in _message_contexts():
            if context not in self._contexts_before and not context.closed:
                context.destroy(linger=0)


def check_version() -> None:
    """Raise ValueError unless the pinned release of SGLang is installed."""
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed != SGLANG_VERSION:
        raise ValueError(
            f"rollout.engine='sglang' needs sglang=={SGLANG_VERSION}; installed: {installed}"
        )


def _check_weights(question: Question, role: str, argument: object) -> CheckWeightsReqInput:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    return CheckWeightsReqInput(
        action=PREFIX + question,
        selector=role,
        skip_tensor_list=None if argument is None else [json.dumps(argument)],
    )


def _message_contexts() -> list[Any]:
    """Return all ZeroMQ contexts of this process. SGLang keeps no reference to some of them."""
    zmq = sys.modules.get("zmq")
    if zmq is None:
        return []
    return [found for found in gc.get_objects() if issubclass(type(found), zmq.Context)]


def _environment(is_cpu: bool, num_ranks: int) -> dict[str, str | None]:
    """Return the environment changes for SGLang's processes."""
    # With it, children of a rank would wait for torchrun's store.
    changes = {"TORCHELASTIC_USE_AGENT_STORE": None} | owned_engine()
    if not is_cpu:
        # Without it SGLang captures graphs into memory that no tag releases.
        changes |= unless_set({"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"})
        # The allocator's settings are the trainer's: SGLang cannot release expandable segments.
        changes |= dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    else:
        changes |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        if num_ranks > 1:
            cores = "|".join(str(rank) for rank in range(num_ranks))
            changes["SGLANG_CPU_OMP_THREADS_BIND"] = cores
    return changes
