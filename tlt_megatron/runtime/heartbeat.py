"""Detects lost ranks: every rank writes heartbeats to the job's store, its neighbours watch them, and a lost rank ends the run.

Opened by trainer/build.py for the whole run. A daemon thread of each rank writes a count and the rank's phase a few times per
`timeout_s`. It watches at most two ranks: the next rank of its machine and, on a machine's first rank, the first rank of the
next machine. So the store gets four short calls per rank and interval: 2,000 per second with 1,000 ranks.

A rank is lost if
- its process has ended without a farewell. Its neighbour on the machine sees this within two intervals;
- its count has not changed for `timeout_s`, measured in the watcher's own beats. Clocks are never compared, so ranks that were
  all suspended together continue. On the watcher's machine, a process that uses CPU time is alive: a long call that holds
  Python's lock must not end a run;
- it is rank 0 and its store is closed, or does not answer for `timeout_s`.

All ranks use the first report in the store. Each rank then raises RanksLost when its main thread calls `enter`, `check` or
`explaining`. If that thread is in a collective or in a long rollout, the process ends with exit code 1 soon after.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from tlt_megatron.runtime.collective_errors import describe_collective_error, is_collective_error
from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.job_store import JobStore
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.rank_process import RankProcess, state_of

log = logging.getLogger(__name__)
# For lines that go only to the log files: the console shows only the packages of this project.
_file_log = logging.getLogger("heartbeat")

_BEATS_PER_TIMEOUT = 8
_INTERVAL_RANGE_S = (0.1, 2.0)
_INTERVAL_S_PER_RANK = 0.001  # rank 0's store answers some ten thousand times per second
_GRACE_S = 5.0  # for the main thread to end by itself after a rank is lost
_UNWINDING_S = 60.0  # added once the main thread is ending, to close the engines
_BEATS_TO_READ = 3  # own beats after which every rank has read a report
_FAREWELL = "bye"
_REPORTS = "reports"


class RanksLost(RuntimeError):
    """A rank is gone, silent, too late or has failed, so the run cannot continue.

    Each rank has already written this to its log file.
    """


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A rank that this one watches."""

    process: RankProcess
    is_local: bool  # on this machine, so its process can be inspected
    count: int = -1  # as last read
    cpu_s: float = 0.0
    num_silent: int = 0  # own beats since `count` or `cpu_s` changed


class Heartbeat:
    """The heartbeat of this rank. `running_heartbeat` creates it on all ranks together. With `timeout_s` 0, no rank watches."""

    def __init__(
        self,
        store: JobStore,
        ranks: Sequence[RankProcess],
        rank: int,
        *,
        timeout_s: float,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        """`ranks` are all processes, by rank. `end_process` is called with exit code 1 if the main thread does not end."""
        self.ranks = ranks
        self.rank = rank
        self.timeout_s = timeout_s
        shortest_s, longest_s = _INTERVAL_RANGE_S
        self.interval_s = max(
            min(max(timeout_s / _BEATS_PER_TIMEOUT, shortest_s), longest_s),
            _INTERVAL_S_PER_RANK * len(ranks),
        )
        self.loss: RanksLost | None = None
        self._is_reporter = False  # this rank was the first to report it
        self.phase = "SETUP"
        self._num_phases = 0
        self._num_beats = 0
        self._end_process = end_process
        self._store = store.connect("heartbeat")  # the thread's own connection
        self._main_store = store.part("heartbeat")
        self._watched = [
            _Watched(process=ranks[other], is_local=ranks[other].machine == ranks[rank].machine)
            for other in watched_by(rank, [process.machine for process in ranks])
        ]
        self._last_phases: dict[int, str] = {}
        self._is_unwinding = False
        self._stop = threading.Event()
        self._has_loss = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._beat(self._store)

    def start(self) -> None:
        """Start watching. Call it after all ranks have been created."""
        self._read_beat(0)
        if self.timeout_s:
            self._thread.start()

    def enter(self, phase: str) -> None:
        """Record a new phase of this rank. Raises RanksLost if a rank is lost."""
        self.phase = phase
        self._num_phases += 1
        self.check()
        self._beat(self._main_store)

    def check(self) -> None:
        """Raise RanksLost if a rank is lost. Makes no call to the store."""
        if self.loss is not None:
            self._is_unwinding = True
            raise self.loss

    @contextmanager
    def explaining(self, group_timeout_s: float) -> Iterator[None]:
        """Raise RanksLost in place of a collective's error in the body. It names the ranks that are lost or did not reach the
        call.
        """
        try:
            yield
        except RanksLost:
            self._is_unwinding = True
            raise
        except RuntimeError as error:
            self._is_unwinding = True
            if not is_collective_error(error):
                raise
            raise self._explain(error, group_timeout_s) from error
        except BaseException:
            self._is_unwinding = True
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Stop watching and being watched. `error` is why this rank cannot continue; all other ranks are told."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self.timeout_s)
        try:
            if error is not None and self.loss is None:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                process = self.ranks[self.rank]
                self._report(f"{process} has failed in phase {self.phase}: {reason}")
            self._store.set(f"beat/{self.rank}", _FAREWELL)
            if self.loss is not None and self.rank == 0:
                self._await_readers()
        except dist.DistError as lost:
            _file_log.info("no farewell: the store of rank 0 is gone (%s)", _first_line(lost))

    def _await_readers(self) -> None:
        """Keep rank 0's store open until the others have read why the run ends. Otherwise they would blame rank 0."""
        deadline = time.monotonic() + _BEATS_TO_READ * self.interval_s
        others = [process.rank for process in self.ranks if process.rank != self.rank]
        while time.monotonic() < deadline and any(self._read_beat(rank) for rank in others):
            time.sleep(0.05)

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self._beat(self._store)
                self._read_reports()
                if self.rank != 0:
                    self._read_beat(0)  # its phase, to report if its store stops answering
                for watched in self._watched:
                    self._watch(watched)
            except dist.DistError as error:
                if self._stop.is_set():
                    return
                self._lose(self._describe_lost_store(error), is_first=self._speaks_for_machine())
            if self.loss is not None:
                self._see_the_end()
                return

    def _beat(self, store: dist.Store) -> None:
        self._num_beats += 1
        text = f"{self._num_beats} {self._num_phases} {self.phase}"
        store.set(f"beat/{self.rank}", text)

    def _read_reports(self) -> None:
        if self._store.check([_REPORTS]):
            reporter, _, text = self._store.get(_REPORTS).decode().splitlines()[0].partition(" ")
            self._lose(text, is_first=int(reporter) == self.rank)

    def _watch(self, watched: _Watched) -> None:
        """Report a rank that has ended or is silent."""
        process = watched.process
        # Read the process first: a process that ends normally has said farewell before.
        state = state_of(process) if watched.is_local else None
        beat = self._read_beat(process.rank)
        if self.loss is not None or beat is None:
            return
        count, _, phase = beat
        if state is not None and state.is_gone:
            self._report(f"{process} is gone: its process ended in phase {phase}")
            return
        cpu_s = state.cpu_s if state is not None else 0.0
        if count != watched.count or cpu_s > watched.cpu_s:
            watched.count, watched.cpu_s, watched.num_silent = count, cpu_s, 0
            return
        watched.num_silent += 1
        if watched.num_silent * self.interval_s >= self.timeout_s:
            how = "its process is stopped" if state and state.is_stopped else "it does not answer"
            self._report(f"{process} has been {self._silence()} in phase {phase}: {how}")

    def _silence(self) -> str:
        return f"silent for run.heartbeat_timeout_s={self.timeout_s:g} s"

    def _read_beat(self, rank: int) -> tuple[int, int, str] | None:
        """Return the count, the number of phases and the phase; None after the rank's farewell."""
        text = self._store.get(f"beat/{rank}").decode()
        if text == _FAREWELL:
            return None
        count, num_phases, phase = text.split(" ", 2)
        self._last_phases[rank] = phase
        return int(count), int(num_phases), phase

    def _report(self, text: str) -> None:
        self._store.append(_REPORTS, f"{self.rank} {text}\n")
        self._read_reports()

    def _describe_lost_store(self, error: dist.DistError) -> str:
        """Return why rank 0's store does not answer, as far as this rank can tell."""
        process = self.ranks[0]
        phase = self._last_phases.get(0)
        where = f" in phase {phase}" if phase else ""
        is_local = process.machine == self.ranks[self.rank].machine
        state = state_of(process) if is_local else None
        if state is not None and state.is_gone:
            what = f"is gone{where}: its process has ended"
        elif state is not None and state.is_stopped:
            what = f"has been {self._silence()}{where}: its process is stopped"
        elif "Timeout" in str(error) or "timeout" in str(error):
            what = f"has been {self._silence()}{where}: its store does not answer"
        else:
            what = f"is gone{where}: its store is closed"
        return f"{process} {what}"

    def _speaks_for_machine(self) -> bool:
        """Return whether this rank reports for its machine. Without a store, one rank of each machine reports."""
        own = self.ranks[self.rank].machine
        others = [p.rank for p in self.ranks if p.machine == own and p.rank != 0]
        return others[:1] == [self.rank]

    def _lose(self, text: str, *, is_first: bool) -> None:
        if self.loss is None:
            self._is_reporter = is_first
            self.loss = RanksLost(text)
            _file_log.info("the run ends: %s (this rank: phase %s)", text, self.phase)
            self._has_loss.set()

    def _see_the_end(self) -> None:
        """Give the main thread a moment to end by itself, then end the process."""
        deadline = time.monotonic() + _GRACE_S
        is_extended = False
        while not self._stop.wait(0.1):
            if self._is_unwinding and not is_extended:
                deadline, is_extended = deadline + _UNWINDING_S, True
            if time.monotonic() >= deadline:
                # The main threads of other ranks may hang too, so only the reporting rank writes to its console.
                speaker, level = (
                    (log, logging.ERROR) if self._is_reporter else (_file_log, logging.INFO)
                )
                speaker.log(
                    level, "the run ends: %s (this rank: still in phase %s)", self.loss, self.phase
                )
                self._end_process(1)
                return

    def _explain(self, error: RuntimeError, group_timeout_s: float) -> RanksLost:
        text, is_timeout = describe_collective_error(error, group_timeout_s)
        # A broken connection shows at once. The reason takes a few beats to reach the store.
        if self._thread.is_alive() and not is_timeout:
            self._has_loss.wait(2 * _BEATS_TO_READ * self.interval_s)
        if self.loss is not None:
            return RanksLost(f"{self.loss}; seen in {text}")
        behind = self._ranks_behind()
        if behind:
            text += f"; not there yet: {behind}"
        _file_log.info("the run ends: %s (this rank: phase %s)", text, self.phase)
        return RanksLost(f"{text} (phase {self.phase})")

    def _ranks_behind(self) -> str:
        """Return the ranks that have entered fewer phases than this one, as text."""
        found = []
        try:
            for process in self.ranks:
                beat = self._read_beat(process.rank)
                if beat is not None and beat[1] < self._num_phases:
                    found.append(f"{process} in phase {beat[2]}")
        except dist.DistError as error:
            found.append(self._describe_lost_store(error))
        return ", ".join(found)


def watched_by(rank: int, machines: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that `rank` watches; `machines` holds the machine of each rank.

    Each rank watches the next rank of its machine, in a circle. A machine's first rank also watches the first rank of the next
    machine. Example: `watched_by(0, ["a", "a", "b", "b"])` is (1, 2).
    """
    local = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    firsts = [machines.index(machine) for machine in dict.fromkeys(machines)]
    circles = [circle for circle in (local, firsts) if rank in circle and len(circle) > 1]
    return tuple(circle[(circle.index(rank) + 1) % len(circle)] for circle in circles)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or repr(error)


@contextmanager
def running_heartbeat(
    store: JobStore, world: Group, timeout_s: float
) -> Iterator[Heartbeat | None]:
    """Run the heartbeat of this rank while the body runs. Yields None in a world of one.

    A collective of the world, also at a normal end. If the body fails, the other ranks are told why.
    """
    if world.size == 1:
        yield None
        return
    ranks = gather_objects(RankProcess.own(world.rank), world)
    heartbeat = Heartbeat(store, ranks, world.rank, timeout_s=timeout_s)
    barrier(world)
    heartbeat.start()
    try:
        yield heartbeat
    except BaseException as error:
        heartbeat.close(error)
        raise
    heartbeat.close()
    heartbeat.check()
    barrier(world)
