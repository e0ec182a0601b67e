"""Runs inside a rank: finds the moment that a schedule names, and there waits for the fault or brings it about.

It observes the spans of the trace (runtime/timeline.py) and Python's audit events of file operations. `Plan` travels as JSON, to
ranks of torchrun too.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PHASES = ("start", "setup", "rollout", "spot", "update", "checkpoint", "evaluation", "finish")
_LIMIT_S = 300.0  # for the other side to act; the schedule is given up by then
_FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where and when a rank is to act."""

    rank: int
    phase: str  # one of PHASES
    step: int = 1  # RL step; of an evaluation or checkpoint: steps done
    action: str = "wait"  # wait | kill | stop | full_disk | clock | nan | silence
    amount: float = 0.0  # clock: seconds
    operation: int = 0  # > 0: at so many file operations below `watched`, after the moment
    watched: str = ""  # folder
    held_rank: int = -1  # a rank that stays in the rollouts of `step` until the fault has happened
    store_delay_s: float = -1.0  # >= 0: ranks but the first reach the spot store by way of a proxy

    def to_json(self) -> str:
        """For an environment variable."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """From `to_json`."""
        return Plan(**json.loads(text))


def install(plan: Plan, folder: Path, rank: int) -> None:
    """Watch this process, which is rank `rank`; marks go to `folder`."""
    probe = _Probe(plan, folder, rank)
    if plan.store_delay_s >= 0 and rank > 0:
        probe.proxy = _Proxy(plan.store_delay_s)
        _reach_stores_through(probe.proxy)
    if rank not in (plan.rank, plan.held_rank):
        return
    probe.watch_spans()
    if plan.operation and rank == plan.rank:
        sys.addaudithook(probe.on_audit)
    probe.at("start", 1)


class _Probe:
    def __init__(self, plan: Plan, folder: Path, rank: int) -> None:
        self.plan = plan
        self.folder = folder
        self.rank = rank
        self.proxy: _Proxy | None = None
        self.num_updates = 0
        self.is_evaluating = False
        self.is_reached = False
        self.num_operations = 0

    def watch_spans(self) -> None:
        """Be told of every span of this process."""
        from tlt_megatron.runtime.timeline import Timeline

        make, span = Timeline.__init__, Timeline.span

        def observed_init(timeline: Timeline, *args: Any, **kwargs: Any) -> None:
            make(timeline, *args, **kwargs)
            self.at("setup", 1)

        def observed_span(timeline: Timeline, name: str, /, **kwargs: Any) -> _Watched:
            return _Watched(span(timeline, name, **kwargs), name, self)

        Timeline.__init__ = observed_init  # type: ignore[method-assign]
        Timeline.span = observed_span  # type: ignore[method-assign]

    def enter(self, name: str) -> None:
        """A span begins."""
        if threading.current_thread() is not threading.main_thread():
            return
        step = self.num_updates + 1
        if name == "EVAL":
            self.is_evaluating = True
            self.at("evaluation", self.num_updates)
        elif name == "CHECKPOINT":
            self.at("checkpoint", self.num_updates)
        elif self.is_evaluating:
            return
        elif name == "ROLLOUT":
            if self.rank == self.plan.held_rank and step == self.plan.step:
                self.await_("go")
            self.at("rollout", step)
        elif name == "UPDATE":
            self.at("update", step)
        elif name in ("IDLE", "DRAFT-TRAIN"):
            self.at("spot", step)

    def leave(self, name: str) -> None:
        """A span has ended without an error."""
        if name == "EVAL":
            self.is_evaluating = False
        elif name == "UPDATE":
            self.num_updates += 1
        elif name == "CHECKPOINT":
            self.at("finish", self.num_updates)

    def at(self, phase: str, step: int) -> None:
        """This rank enters `phase` of `step`."""
        is_it = phase == self.plan.phase and step == self.plan.step
        if self.is_reached or not is_it or self.rank != self.plan.rank:
            return
        self.is_reached = True
        if not self.plan.operation:
            self.act()

    def on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count what is about to happen to the watched files."""
        if not self.is_reached or event not in _FILE_EVENTS:
            return
        is_read = event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR))
        path = arguments[0]
        if is_read or not isinstance(path, str | os.PathLike):
            return
        if not str(path).startswith(self.plan.watched):
            return
        self.num_operations += 1
        if self.num_operations == self.plan.operation:
            self.act()

    def act(self) -> None:
        """The fault, or the place where it comes from outside."""
        self.mark("reached")
        action = self.plan.action
        if action == "wait":
            self.await_("go")
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "full_disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.plan.watched)
        elif action == "clock":
            _shift_clock(self.plan.amount)
        elif action == "nan":
            _poison_policy()
        else:
            assert action == "silence", action
            assert self.proxy is not None
            self.proxy.is_silent = True
        if action != "wait":
            self.mark("go")

    def mark(self, name: str) -> None:
        """Tell the other side, at once."""
        (self.folder / name).touch()

    def await_(self, name: str) -> None:
        """Block until the other side has marked `name`."""
        deadline = time.monotonic() + _LIMIT_S
        while not (self.folder / name).exists() and time.monotonic() < deadline:
            time.sleep(0.002)


class _Watched:
    """A span that the probe is told of."""

    def __init__(self, inner: AbstractContextManager[None], name: str, probe: _Probe) -> None:
        self._inner, self._name, self._probe = inner, name, probe

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._probe.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if kind is None:
            self._probe.leave(self._name)
        return self._inner.__exit__(kind, error, trace)


def _shift_clock(seconds: float) -> None:
    """The wall clock of this process jumps; monotonic clocks do not, as when a host's time is set."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


def _poison_policy() -> None:
    """One weight of every parameter of the policy, and of the optimizer's copy of it, becomes NaN."""
    import torch

    from tlt_megatron.mcore.optimizer import PolicyOptimizer

    for policy in (o for o in gc.get_objects() if isinstance(o, PolicyOptimizer)):
        megatron = policy.megatron
        for optimizer in getattr(megatron, "chained_optimizers", [megatron]):
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            chunks = [p for chunk in optimizer.model_chunks for p in chunk.parameters()]
            with torch.no_grad():
                for parameter in (p for p in [*owned, *chunks] if p.numel()):
                    parameter.view(-1)[0] = float("nan")


class _Proxy:
    """Forwards connections of this process: each chunk late by `delay_s`, none once `is_silent`."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.is_silent = False

    def forward(self, host: str, port: int) -> int:
        """A local port that leads to `host`:`port`."""
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener, host, port), daemon=True).start()
        return listener.getsockname()[1]

    def _serve(self, listener: socket.socket, host: str, port: int) -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection((host, port))
            threading.Thread(target=self._pump, args=(near, far), daemon=True).start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        while True:
            readable, _, _ = select.select([near, far], [], [])
            for end in readable:
                data = end.recv(1 << 16)
                while self.is_silent:
                    time.sleep(0.05)
                if not data:
                    near.close()
                    far.close()
                    return
                time.sleep(self.delay_s)
                other[end].sendall(data)


def _reach_stores_through(proxy: _Proxy) -> None:
    """Stores that this rank opens and does not host are reached by way of `proxy`. The world's own store stands already."""
    import torch.distributed as dist

    class ProxiedStore(dist.TCPStore):
        def __init__(self, host: str, port: int, *args: Any, **kwargs: Any) -> None:
            if not kwargs.get("is_master"):
                host, port = "127.0.0.1", proxy.forward(host, port)
            super().__init__(host, port, *args, **kwargs)

    dist.TCPStore = ProxiedStore  # type: ignore[misc]
