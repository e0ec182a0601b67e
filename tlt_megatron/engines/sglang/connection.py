"""A running `sglang.Engine` and the way to talk to it: start within a timeout, watched waits, questions, an end.

Made by the engine. What to know: SGLang installs signal and exit handlers that end every child of this process; they are
taken back here, and a process of SGLang's that dies or complains raises in whoever waits.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tlt_megatron.engines.sglang.answers import PREFIX, Question
from tlt_megatron.engines.sglang.processes import EngineProcesses, Signals, StartWatch, watched
from tlt_megatron.runtime.environment import environment

if TYPE_CHECKING:
    from sglang import Engine

log = logging.getLogger(__name__)

TARGET, DRAFT = "target", "draft"  # SGLang's `selector`: whose weights


class Connection:
    """One in-process SGLang engine with our plugin in all of its schedulers."""

    def __init__(
        self, arguments: Mapping[str, object], *, timeout_s: float, is_cpu: bool, num_ranks: int
    ) -> None:
        """RuntimeError if it is not up within `timeout_s`, or if the plugin is not in place."""
        self._processes = EngineProcesses()
        self._contexts_before = {id(context) for context in _message_contexts()}
        self._signals = Signals(self._processes.complain)
        self.engine = self._start(arguments, timeout_s, _environment(is_cpu, num_ranks))
        self._is_closed = False
        atexit.register(self.close)
        try:
            self._check_plugin()
        except RuntimeError:
            self.close()
            raise

    def _start(
        self, arguments: Mapping[str, object], timeout_s: float, changes: Mapping[str, str | None]
    ) -> Engine:
        started = time.perf_counter()
        try:
            with environment(changes), StartWatch(self._processes, timeout_s) as watch:
                import sglang

                engine = sglang.Engine(custom_sigquit_handler=_ignore, **arguments)
        except BaseException as error:  # an interrupt of the user must leave nothing behind either
            log.exception("the sglang engine did not start: its processes are ended")
            self._processes.end()
            self._drop_messages()
            self._signals.restore()
            if not isinstance(error, Exception):
                raise
            reason = f"not up within sglang.start_timeout_s={timeout_s}" if watch.is_late else error
            raise RuntimeError(f"the sglang engine did not start: {reason}") from error
        atexit.unregister(engine.shutdown)
        engine.tokenizer_manager._subprocess_watchdog.stop()
        self._processes.note_started()

        async def open_mailbox() -> None:
            engine.tokenizer_manager.auto_create_handle_loop()

        engine.loop.run_until_complete(open_mailbox())
        self._signals.take_back(engine.loop)
        log.info("sglang engine is up after %.1f s", time.perf_counter() - started)
        return engine

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
                f"sglang has no {', '.join(missing)}: the plugin is for sglang==0.5.23"
            )

    def run(self, work: object) -> object:
        """Wait for a coroutine of SGLang's. RuntimeError if a process behind it dies."""
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        return self.engine.loop.run_until_complete(watched(work, self._processes))

    def call(self, method: str, request: object) -> object:
        """A control request of SGLang's tokenizer manager; RuntimeError if it is refused."""
        answer = self.run(getattr(self.engine.tokenizer_manager, method)(request, None))
        if isinstance(answer, tuple) and not answer[0]:
            raise RuntimeError(f"sglang refused {method}: {answer[1]}")
        return answer

    def ask(
        self, question: Question, *, role: str = TARGET, argument: object = None
    ) -> list[object]:
        """The answers of all scheduler ranks (`answers.Answers`)."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        request = CheckWeightsReqInput(
            action=PREFIX + question,
            selector=role,
            skip_tensor_list=None if argument is None else [json.dumps(argument)],
        )
        _, _, ranks, _ = self.call("check_weights", request)
        if ranks is None:
            raise RuntimeError(f"sglang has no {role} to ask for {question}")
        key = question if role == TARGET else f"{role}.{question}"
        return [json.loads(rank["checksums"][key]) for rank in ranks]

    def close(self) -> None:
        """End SGLang's processes and nothing else."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._processes.end()
        loop = self.engine.loop
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        self._drop_messages()
        self._signals.restore()

    def _drop_messages(self) -> None:
        """Messages to processes that are gone would keep their sockets, and with them this process, alive for ever."""
        for context in _message_contexts():
            if id(context) not in self._contexts_before and not context.closed:
                context.destroy(linger=0)


def _message_contexts() -> list[object]:
    """All ZeroMQ contexts of this process. SGLang keeps no reference to some of its own, and none is left to a failed start."""
    zmq = sys.modules.get("zmq")
    if zmq is None:
        return []
    return [found for found in gc.get_objects() if issubclass(type(found), zmq.Context)]


def _environment(is_cpu: bool, num_ranks: int) -> dict[str, str | None]:
    """What SGLang's processes start with."""
    # Left in place, it makes children of a rank wait for torchrun's store.
    changes: dict[str, str | None] = {"TORCHELASTIC_USE_AGENT_STORE": None}
    if is_cpu:
        changes |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        if num_ranks > 1:
            cores = "|".join(str(rank) for rank in range(num_ranks))
            changes["SGLANG_CPU_OMP_THREADS_BIND"] = cores
    return changes


def _ignore(signum: int, frame: object) -> None:
    """SIGQUIT while SGLang starts: its own error follows."""
