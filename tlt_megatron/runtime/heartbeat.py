"""Detects lost ranks: every rank writes heartbeats to the job's store, its neighbours watch them,
and a lost rank ends the run.

A daemon thread of each rank writes a count and the rank's phase several times per `timeout_s`, and
reads the events of the run (events.py). It watches at most two ranks (`watched_by`). So the store
gets six short calls per rank and interval: 2,000 per second with 1,000 ranks.

A rank is lost if
- its process has ended without a farewell. Its neighbour on the machine sees this within two
  intervals;
- its count has not changed for `timeout_s`, measured in the watcher's own beats. Clocks are never
  compared, so ranks that were all suspended together continue. On the watcher's machine, a process
  that uses CPU time is alive: a long call that holds Python's lock must not end a run;
- it is rank 0 and its store is closed, or does not answer for `timeout_s`.

The first event of a rank that is lost or ends counts on all ranks. Each then raises RanksLost when
its main thread calls `tell_phase`, `check` or `explaining`. If that thread is in a collective or in
a long rollout, the process ends soon after.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from tlt_megatron.runtime.collective_errors import describe_collective_error, is_collective_error
from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.events import Beats, Event, EventKind, EventLog
from tlt_megatron.runtime.job_store import JobStore
from tlt_megatron.runtime.log import FILE_ONLY
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.rank_process import ProcessState, RankProcess, find_process, state_of
from tlt_megatron.runtime.status import RankStatus
from tlt_megatron.runtime.stop import StopRequest, end_process

log = logging.getLogger(__name__)

_BEATS_PER_TIMEOUT = 8
_LONGEST_INTERVAL_S = 0.5  # a request to stop reaches all ranks within one interval
_INTERVAL_S_PER_RANK = 0.003  # rank 0's store answers some ten thousand times per second
_GRACE_S = 5.0  # for the main thread to end by itself after a rank is lost
_UNWINDING_S = 60.0  # added once the main thread is ending, to close the engines
_BEATS_TO_READ = 4  # own beats after which every rank has read an event
_BEATS_TO_REPORT = 16  # until a process that has ended is reported and read


class RanksLost(RuntimeError):
    """A rank is gone, silent, too late or has failed, so the run cannot continue. `code` is the
    exit code.

    Each rank has already written this to its log file.
    """

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A rank that this one watches."""

    process: RankProcess
    count: int = -1  # as last read
    cpu_s: float = 0.0
    num_silent: int = 0  # own beats since `count` or `cpu_s` changed


class Heartbeat:
    """The heartbeat of this rank. `running_heartbeat` creates it on all ranks together."""

    def __init__(
        self,
        store: JobStore,
        ranks: Sequence[RankProcess],
        rank: int,
        stop: StopRequest,
        timeout_s: float,
    ) -> None:
        """`ranks` are all processes, by rank."""
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.interval_s = max(
            min(timeout_s / _BEATS_PER_TIMEOUT, _LONGEST_INTERVAL_S),
            _INTERVAL_S_PER_RANK * len(ranks),
        )
        self.status = RankStatus(rank=rank, num_ranks=len(ranks))
        self.beats = Beats(store, self.status)
        self._stop_request = stop
        self.loss: RanksLost | None = None  # why the run ends, once that is known
        self._is_lost = threading.Event()
        self._is_closed = threading.Event()
        self._is_unwinding = False  # the main thread is ending
        watched = watched_by(rank, [process.machine for process in ranks])
        self._watched = [_Watched(process=ranks[other]) for other in watched]
        # found now, while they run: a process that gets the pid later is another one
        self._local = {
            other: find_process(ranks[other].pid)
            for other in {0, *watched}
            if ranks[other].machine == ranks[rank].machine
        }
        self._num_rounds = 0  # counted by the heartbeat thread
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._store_watch = threading.Thread(target=self._watch_store, daemon=True)
        self.beats.write()

    def start(self) -> None:
        """Start watching. Call it after all ranks have been created."""
        self._thread.start()
        self._store_watch.start()

    def tell_phase(self) -> None:
        """Tell the others of a phase that has begun. Raises RanksLost if a rank is lost."""
        self.check()
        self.beats.write(from_main_thread=True)

    def check(self) -> None:
        """Raise RanksLost if a rank is lost. Makes no call to the store."""
        if self.loss is not None:
            self._is_unwinding = True
            raise self.loss

    @contextmanager
    def explaining(self, group_timeout_s: float) -> Iterator[None]:
        """Raise RanksLost in place of a collective's error in the body. It names the ranks that are
        lost or did not reach the call.
        """
        try:
            yield
        except BaseException as error:
            self._is_unwinding = True
            is_explained = isinstance(error, RanksLost)
            if isinstance(error, RuntimeError) and not is_explained and is_collective_error(error):
                raise self._explain(error, group_timeout_s) from error
            raise

    def close(self) -> None:
        """Stop watching and being watched.

        Rank 0 keeps its store open until the others have read why a run ends.
        """
        self._is_closed.set()
        if self._thread.is_alive() and not self._stop_request.has_lost_store:
            self._thread.join(self.timeout_s)
        if self._thread.is_alive():
            return  # the store does not answer
        try:
            self.beats.say_farewell()
            if self.status.rank == 0 and EventKind.END in self.beats.events.firsts():
                deadline = time.monotonic() + _BEATS_TO_READ * self.interval_s
                others = [process.rank for process in self.ranks if process.rank != 0]
                while time.monotonic() < deadline and any(map(self.beats.read, others)):
                    time.sleep(0.05)
        except dist.DistError as lost:
            why = str(lost).partition("\n")[0] or repr(lost)
            log.info("no farewell: the store of rank 0 is gone (%s)", why, extra=FILE_ONLY)

    def _run(self) -> None:
        while not self._is_closed.wait(self.interval_s):
            try:
                self.beats.write()
                self._read_events()
                if self.status.rank != 0:
                    self.beats.read(0)  # its phase, to report if its store stops answering
                for watched in self._watched:
                    self._watch(watched)
                self._num_rounds += 1
            except dist.DistError as error:
                self._lose_store(error)
            if self.loss is not None:
                self._await_end()
                return

    def _watch_store(self) -> None:
        """Watch the other thread: a call to the store of a frozen rank 0 does not return."""
        seen = num_silent = 0  # silent: beats of this thread since `seen` changed
        while self.loss is None and not self._is_closed.wait(self.interval_s):
            num_silent = num_silent + 1 if self._num_rounds == seen else 0
            seen = self._num_rounds
            if num_silent * self.interval_s >= self.timeout_s:
                self._lose_store(dist.DistError("Timeout"))
                if self.loss is not None:
                    self._await_end()

    def _lose(self, loss: RanksLost) -> None:
        """Take the first reason to end."""
        if self.loss is None:
            self.loss = loss
            self._log_reason(str(loss))
            self._is_lost.set()

    def _log_reason(self, text: str) -> None:
        phase = self.status.phase
        log.info("the run ends: %s (this rank: phase %s)", text, phase, extra=FILE_ONLY)

    def _await_end(self) -> None:
        """Give the main thread a moment to end by itself, then end the process."""
        assert self.loss is not None
        start = time.monotonic()
        while not self._is_closed.wait(0.1):
            # An ending main thread closes the engines.
            limit_s = _GRACE_S + _UNWINDING_S * self._is_unwinding
            if time.monotonic() - start >= limit_s:
                # The main threads of other ranks may hang too, so one rank writes to its console.
                text = f"the run ends: {self.loss} (this rank: still in phase {self.status.phase})"
                end_process(self.loss.code, text, is_shown=self._stop_request.speaks)
                return

    def _lose_store(self, error: dist.DistError) -> None:
        if not self._is_closed.is_set():
            self._stop_request.lose_store(error)
            self._lose(RanksLost(self._describe_lost_store(error)))

    def _read_events(self) -> None:
        for event in self.beats.events.firsts().values():
            self._stop_request.hear(event)
            if event.kind == EventKind.END:
                self._lose(RanksLost(event.text, event.code))

    def _watch(self, watched: _Watched) -> None:
        """Report a rank that has ended or is silent."""
        process = watched.process
        # Read the process first: a process that ends normally has said farewell before.
        state = self._state_of(process)
        beat = self.beats.read(process.rank)
        if self.loss is not None or beat is None:
            return
        if beat.count != watched.count or state.cpu_s > watched.cpu_s:
            watched.count, watched.cpu_s, watched.num_silent = beat.count, state.cpu_s, 0
        else:
            watched.num_silent += 1
        if state.is_gone or watched.num_silent * self.interval_s >= self.timeout_s:
            self._report(self._describe(process, state, beat.phase, "it does not answer"))

    def _state_of(self, process: RankProcess) -> ProcessState:
        """Return what this machine knows of a process: nothing if it runs on another one."""
        if process.rank not in self._local:
            return ProcessState(is_gone=False)
        return state_of(self._local[process.rank])

    def _describe(self, process: RankProcess, state: ProcessState, phase: str, silence: str) -> str:
        """Return why a rank is lost. `silence` says it of one whose process may be alive."""
        if state.is_gone:
            return f"{process} is gone: its process ended in phase {phase}"
        why = "its process is stopped" if state.is_stopped else silence
        for_long = f"silent for run.heartbeat_timeout_s={self.timeout_s:g} s"
        return f"{process} has been {for_long} in phase {phase}: {why}"

    def _report(self, text: str) -> None:
        self.beats.events.append(
            Event(kind=EventKind.END, rank=self.status.rank, code=1, text=text)
        )
        self._read_events()

    def _describe_lost_store(self, error: dist.DistError) -> str:
        """Return why rank 0's store does not answer, as far as this rank can tell."""
        process, phase = self.ranks[0], self.beats.first_phase
        state = self._state_of(process)
        if state.is_gone or state.is_stopped or "timeout" in str(error).lower():
            return self._describe(process, state, phase, "its store does not answer")
        return f"{process} is gone: its store was closed in phase {phase}"

    def _explain(self, error: RuntimeError, group_timeout_s: float) -> RanksLost:
        text, is_timeout = describe_collective_error(error, group_timeout_s)
        # A broken connection shows at once. The reason takes a few beats to reach the store.
        if self._thread.is_alive() and not is_timeout:
            self._is_lost.wait(_BEATS_TO_REPORT * self.interval_s)
        if self.loss is not None:
            return RanksLost(f"{self.loss}; seen in {text}", self.loss.code)
        behind = self._ranks_behind()
        if behind:
            text += f"; not there yet: {behind}"
        self._log_reason(text)
        return RanksLost(f"{text} (phase {self.status.phase})")

    def _ranks_behind(self) -> str:
        """Return the ranks that have entered fewer phases than this one, as text."""
        found = []
        try:
            for process in self.ranks:
                beat = self.beats.read(process.rank)
                if beat is not None and beat.num_phases < self.status.num_phases:
                    found.append(f"{process} in phase {beat.phase}")
        except dist.DistError as error:
            found.append(self._describe_lost_store(error))
        return ", ".join(found)


def watched_by(rank: int, machines: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that `rank` watches; `machines` holds the machine of each rank.

    Each rank watches the next rank of its machine, in a circle. A machine's first rank also watches
    the first rank of the next machine. Example: `watched_by(0, ["a", "a", "b", "b"])` is (1, 2).
    """
    local = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    firsts = [machines.index(machine) for machine in dict.fromkeys(machines)]
    circles = [circle for circle in (local, firsts) if rank in circle and len(circle) > 1]
    return tuple(circle[(circle.index(rank) + 1) % len(circle)] for circle in circles)


@contextmanager
def running_heartbeat(
    store: JobStore, world: Group, timeout_s: float, group_timeout_s: float, stop: StopRequest
) -> Iterator[Heartbeat]:
    """Run the heartbeat of this rank while the body runs. A collective of the world, also at a
    normal end.

    `stop` hears of the requests of other ranks, and tells them of its own.
    """
    ranks = gather_objects(RankProcess(rank=world.rank), world)
    heartbeat = Heartbeat(store, ranks, world.rank, stop, timeout_s)
    if world.size > 1:
        stop.share(EventLog(store.connect("heartbeat")))
        barrier(world)
        heartbeat.start()
    try:
        yield heartbeat
        with heartbeat.explaining(group_timeout_s):
            barrier(world)  # a rank that is lost until here is named
            heartbeat.close()
            barrier(world)  # rank 0 hosts the store of the others' last calls
    except BaseException:
        heartbeat.close()
        raise
