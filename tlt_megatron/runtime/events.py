"""The events that end a run early: lines in the job's store, in one order for all ranks.

stop.py writes that a stop is requested, or why this rank ends. heartbeat.py writes which rank is lost, and reads the events for
this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY = "events"


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
    """All events of the run so far. The first of a kind counts. Every call may raise dist.DistError."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def append(self, event: Event) -> None:
        """Tell all ranks, which read their events several times per heartbeat timeout."""
        text = " ".join(event.text.splitlines())
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
