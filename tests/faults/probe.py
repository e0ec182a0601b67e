"""Runs inside a rank: finds the moment that a schedule names, and there waits for the fault or
brings it about.

It observes the spans of the trace (runtime/timeline.py) and Python's audit events of file
operations.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LIMIT_S = 300.0  # for the other side to act; the schedule is given up by then
_FREES = ("os.remove", "os.rmdir")
_CHANGES = ("os.rename", "os.mkdir", "os.link", *_FREES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where and when a rank is to act."""

    rank: int
    phase: str  # start | setup | rollout | spot | update | checkpoint | evaluation | finish
    step: int = 1  # RL step; of an evaluation, a checkpoint and the finish: steps done
    resumed_step: int = 0  # the run is resumed from this one
    action: str = "wait"  # wait | kill | full_disk | clock | silence
    amount: float = 0.0  # clock: seconds
    operation: int = 0  # > 0: at so many file operations below `watched`, after the moment
    watched: str = ""  # folder
    held_rank: int = -1  # a rank that stays in the rollouts of `step` until the fault has happened
    store_delay_s: float = -1.0  # >= 0: ranks but the first reach the spot store through a proxy

    @property
    def done(self) -> int:
        """RL steps whose weights exist at this moment."""
        if self.phase in ("start", "setup"):
            return self.resumed_step
        return self.step - (self.phase in ("rollout", "spot", "update"))

    @property
    def saved(self) -> int:
        """RL steps whose checkpoint exists at this moment, with one after each step."""
        is_before_save = self.phase in ("checkpoint", "evaluation") and self.done > 0
        return max(self.resumed_step, self.done - is_before_save)


def install(moment: Moment, folder: Path, rank: int) -> None:
    """Watch this process, which is rank `rank`; marks go to `folder`."""
    probe = _Probe(moment, folder, rank)
    if moment.store_delay_s >= 0 and rank > 0:
        probe.proxy = _Proxy(moment.store_delay_s)
    if rank in (moment.rank, moment.held_rank):
        probe.watch_spans()
        if moment.operation and rank == moment.rank:
            sys.addaudithook(probe.on_audit)
        probe.at("start", 1)


class _Probe:
    def __init__(self, moment: Moment, folder: Path, rank: int) -> None:
        self.moment = moment
        self.folder = folder
        self.rank = rank
        self.proxy: _Proxy | None = None
        self.num_updates = moment.resumed_step
        self.is_evaluating = self.is_reached = False
        self.num_operations = 0

    def watch_spans(self) -> None:
        """Be told of the trace's beginning and of every span of the main thread."""
        from tlt_megatron.runtime.timeline import Timeline

        make, span = Timeline.__init__, Timeline.span

        def observed_init(timeline: Timeline, *args: Any, **kwargs: Any) -> None:
            make(timeline, *args, **kwargs)
            self.at("setup", 1)

        @contextmanager
        def observed_span(timeline: Timeline, name: str, /, **kwargs: Any) -> Iterator[None]:
            is_main = threading.current_thread() is threading.main_thread()
            with span(timeline, name, **kwargs):
                if is_main:
                    self.enter(name)
                yield
                if is_main:
                    self.leave(name)

        Timeline.__init__ = observed_init  # type: ignore[method-assign]
        Timeline.span = observed_span  # type: ignore[method-assign,assignment]

    def enter(self, name: str) -> None:
        """A span begins."""
        step = self.num_updates + 1
        if name == "EVAL":
            self.is_evaluating = True
            self.at("evaluation", self.num_updates)
        elif name == "CHECKPOINT":
            self.at("checkpoint", self.num_updates)
        elif self.is_evaluating:
            return
        elif name == "ROLLOUT":
            if self.rank == self.moment.held_rank and step == self.moment.step:
                self.await_go()
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
        is_it = (self.rank, phase, step) == (self.moment.rank, self.moment.phase, self.moment.step)
        if is_it and not self.is_reached:
            self.is_reached = True
            if not self.moment.operation:
                self.act()

    def on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count what is about to happen to the watched files."""
        if not self.is_reached or event not in ("open", *_CHANGES):
            return
        is_read = event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if is_read and self.moment.phase != "start":  # a resume reads, a save writes
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike):
            return
        takes_space = event in ("open", "os.rename", "os.link") or not Path(path).exists()
        if self.moment.action == "full_disk" and (event in _FREES or not takes_space):
            return
        if str(path).startswith(self.moment.watched):
            self.num_operations += 1
            if self.num_operations == self.moment.operation:
                self.act()

    def act(self) -> None:
        """The fault, or the place where it comes from outside."""
        (self.folder / "reached").touch()
        match self.moment.action:
            case "wait":
                self.await_go()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "full_disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.moment.watched)
            case "clock":
                _shift_clock(self.moment.amount)
            case "silence":
                assert self.proxy is not None
                self.proxy.is_silent = True
        (self.folder / "go").touch()

    def await_go(self) -> None:
        """Block until the fault has happened."""
        deadline = time.monotonic() + _LIMIT_S
        while not (self.folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.002)


def _shift_clock(seconds: float) -> None:
    """The wall clock of this process jumps; monotonic clocks do not, as when a host's time is
    set.
    """
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


class _Proxy:
    """Between this process and the stores that it opens and does not host: each message is late by
    `delay_s`, and none arrives once `is_silent`. The world's own store exists already.
    """

    def __init__(self, delay_s: float) -> None:
        import torch.distributed as dist

        self.delay_s = delay_s
        self.is_silent = False
        forward = self._forward

        class ProxiedStore(dist.TCPStore):
            def __init__(self, host: str, port: int, *args: Any, **kwargs: Any) -> None:
                if not kwargs.get("is_master"):
                    host, port = "127.0.0.1", forward(host, port)
                super().__init__(host, port, *args, **kwargs)

        dist.TCPStore = ProxiedStore  # type: ignore[misc]

    def _forward(self, host: str, port: int) -> int:
        """Return a local port that leads to `host`:`port`."""
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, port))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()[1]

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                while self.is_silent:
                    time.sleep(0.05)
                time.sleep(self.delay_s)
                target.sendall(data)
