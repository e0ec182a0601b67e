"""What ranks tell each other in the job's store: their beats, and the events that end a run early.

stop.py writes that a stop is requested, or why this rank ends. heartbeat.py writes and reads beats,
writes which rank is lost, and reads the events for this rank. An event is a line, in one order for
all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tlt_megatron.runtime.log import encodable
from tlt_megatron.runtime.status import RankStatus

if TYPE_CHECKING:
    import torch.distributed as dist

    from tlt_megatron.runtime.job_store import JobStore

_KEY = "events"
_FAREWELL = "bye"


class EventKind(StrEnum):
    """STOP: save and end the run. END: a rank is lost or ends, so the run cannot continue."""

    STOP = "stop"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`rank` writes it. `code` is the exit code of a run that ends."""

    kind: EventKind
    rank: int
    text: str
    code: int = 0


class EventLog:
    """All events of the run so far.

    The first of a kind counts. Every call may raise dist.DistError.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def append(self, event: Event) -> None:
        """Tell all ranks, which read their events several times per heartbeat timeout."""
        text = encodable(" ".join(event.text.splitlines()))
        line = f"{event.kind}\t{event.rank}\t{event.code}\t{text}\n"
        self._store.append(_KEY, line)  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stubs

    def firsts(self) -> dict[EventKind, Event]:
        """Return the first event of each kind."""
        found: dict[EventKind, Event] = {}
        text = self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""
        for line in text.splitlines():
            kind, rank, code, why = line.split("\t", 3)
            event = Event(kind=EventKind(kind), rank=int(rank), code=int(code), text=why)
            found.setdefault(event.kind, event)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank writes several times per heartbeat timeout."""

    count: int  # beats so far
    num_phases: int  # phases of the loop that began
    phase: str


class Beats:
    """The beats and events of all ranks in the job's store. Every call may raise dist.DistError."""

    def __init__(self, store: JobStore, status: RankStatus) -> None:
        """`status` is of this rank."""
        self.first_phase = status.phase  # rank 0's, as last read
        self._status = status
        self._store = store.connect("heartbeat")  # the heartbeat thread's own connection
        self._main_store = store.part("heartbeat")
        self.events = EventLog(self._store)
        self._num_beats = 0

    def write(self, *, from_main_thread: bool = False) -> None:
        """Write a beat of this rank, with its phase."""
        self._num_beats += 1
        store, now = self._main_store if from_main_thread else self._store, self._status
        store.set(f"beat/{now.rank}", f"{self._num_beats} {now.num_phases} {now.phase}")

    def say_farewell(self) -> None:
        """Write the last beat: this rank ends as it should."""
        self._store.set(f"beat/{self._status.rank}", _FAREWELL)

    def read(self, rank: int) -> Beat | None:
        """Return the newest beat of a rank; None after its farewell."""
        text = self._store.get(f"beat/{rank}").decode()
        if text == _FAREWELL:
            return None
        count, num_phases, phase = text.split(" ", 2)
        if rank == 0:
            self.first_phase = phase
        return Beat(count=int(count), num_phases=int(num_phases), phase=phase)
