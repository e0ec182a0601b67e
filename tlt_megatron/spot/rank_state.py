"""Who does what in a rollout phase: one append-only log in the store, and the one reading of it that all ranks share.

Written and read by spot_trainer.py and session.py. The store puts appends in one order. So ranks that have read equally
far hold the same view, and of two plans for one epoch the first in the log counts. A busy rank makes a single append, when
its rollouts are finished.

Times are seconds of the reader's monotonic clock. Ranks of one machine share that clock, so their own times are taken over;
of a rank on another machine counts when its line was first seen. A wall clock that jumps changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch.distributed as dist

from tlt_megatron.runtime.rank_process import machine_id


class RankState(StrEnum):
    """What a rank does in this phase."""

    ROLLOUT = "rollout"  # generates; takes part in nothing here
    IDLE = "idle"  # finished, in no session; in one soon if it is ready
    TRAINING = "training"  # listed in the newest plan
    DONE = "done"  # every rank is finished


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """Global ranks of each rollout replica; a replica goes idle as one. Its first rank speaks for it."""

    replicas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for replica in self.replicas for rank in replica]
        if sorted(ranks) != list(range(len(ranks))) or not all(self.replicas):
            raise ValueError(f"replicas={self.replicas}: must hold each rank of the world once")

    @staticmethod
    def uniform(world_size: int, replica_size: int = 1) -> ReplicaLayout:
        """Replicas of `replica_size` neighbours."""
        if replica_size < 1 or world_size % replica_size:
            raise ValueError(f"replica_size={replica_size}: must divide the {world_size} ranks")
        starts = range(0, world_size, replica_size)
        return ReplicaLayout(replicas=tuple(tuple(range(s, s + replica_size)) for s in starts))

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(map(len, self.replicas))

    def replica_of(self, rank: int) -> int:
        """The replica that `rank` belongs to."""
        return next(i for i, replica in enumerate(self.replicas) if rank in replica)

    def ranks_of(self, plan: Plan) -> tuple[int, ...]:
        """All ranks of the plan's replicas; the first leads the session."""
        return tuple(rank for replica in plan.replicas for rank in self.replicas[replica])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who trains together, until the next plan."""

    epoch: int  # 1, 2, ... within a phase; the first plan in the log for an epoch is the plan
    replicas: tuple[int, ...]  # as they became idle
    base_updates: int  # of the drafter's life when the phase's first session began


class SharedLog:
    """Lines of words under one key of the store. RuntimeError names rank 0 where the store is gone or silent."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self.key = key
        self._store = store
        self._num_read = 0

    def append(self, *words: object) -> None:
        """Add a line; one store operation."""
        line = " ".join(map(str, words)) + "\n"
        try:
            self._store.append(self.key, line)
        except dist.DistError as error:
            raise _store_lost(error) from error

    def read(self) -> list[list[str]]:
        """The lines since the last call; one store operation. Only after an own `append`: the key must exist."""
        try:
            text = self._store.get(self.key)
        except dist.DistError as error:
            raise _store_lost(error) from error
        lines = text[self._num_read :].decode().splitlines()
        self._num_read = len(text)
        return [line.split() for line in lines]

    def delete(self) -> None:
        """Remove the log. Nobody may read it any more."""
        self._store.delete_key(self.key)


def _store_lost(error: dist.DistError) -> RuntimeError:
    reason = str(error).splitlines()[0] if str(error) else repr(error)
    return RuntimeError(
        f"spot: rank 0, which hosts the store of spot training, does not answer: {reason}"
    )


class PhaseView:
    """What a log says so far, to a reader on `machine`. Pure: equal lines give equal views, times aside."""

    def __init__(self, layout: ReplicaLayout, machine: str = "") -> None:
        self.layout = layout
        self.machine = machine
        self.finished: dict[int, float] = {}  # rank -> time, in the order of the log
        self.ready: set[int] = set()  # ranks that have nothing else to do
        self.plan: Plan | None = None  # the newest
        self.is_closed = False  # the phase has had all the drafter updates that it may
        self._listed: dict[int, int] = {}  # rank -> epoch of the newest plan that lists it
        self._left: dict[int, int] = {}  # rank -> newest epoch that it has reported to be out of

    def apply(self, words: list[str], now: float) -> None:
        """Take in one line, first seen at `now`."""
        kind, *rest = words
        if kind == "finished":
            finished_at = float(rest[2]) if rest[1] == self.machine else now
            self.finished.setdefault(int(rest[0]), finished_at)
        elif kind == "ready":
            self.ready.add(int(rest[0]))
        elif kind == "plan":
            epoch, base_updates, *replicas = map(int, rest)
            if epoch == self.next_epoch:  # else another rank was faster
                self.plan = Plan(epoch=epoch, replicas=tuple(replicas), base_updates=base_updates)
                self._listed.update(dict.fromkeys(self.layout.ranks_of(self.plan), epoch))
        elif kind == "left":
            self._left[int(rest[0])] = max(int(rest[1]), self._left.get(int(rest[0]), 0))
        else:
            assert kind == "closed", words
            self.is_closed = True

    @property
    def next_epoch(self) -> int:
        """The number of the plan that would be next."""
        return 1 if self.plan is None else self.plan.epoch + 1

    @property
    def is_over(self) -> bool:
        """Whether the last rollout has ended."""
        return len(self.finished) == self.layout.world_size

    @property
    def ended_at(self) -> float:
        """When the newest rank finished; the last one, once the phase is over."""
        return max(self.finished.values())

    @property
    def first_finished_at(self) -> float:
        """When the first rank finished."""
        return min(self.finished.values())

    def members(self) -> tuple[int, ...]:
        """Ranks in the newest plan."""
        return self.layout.ranks_of(self.plan) if self.plan else ()

    def listed_in(self, rank: int) -> int:
        """Epoch of the newest plan that lists `rank`; 0 without one."""
        return self._listed.get(rank, 0)

    def has_left(self, rank: int) -> bool:
        """Whether `rank` is known to be out of the newest session that lists it."""
        return self._left.get(rank, 0) >= self.listed_in(rank)

    def free_replicas(self) -> tuple[int, ...]:
        """Replicas all of whose ranks are finished, ready and in no session, as they became idle."""
        order = {rank: place for place, rank in enumerate(self.finished)}
        free = [
            (max(order[rank] for rank in replica), index)
            for index, replica in enumerate(self.layout.replicas)
            if all(r in order and r in self.ready and self.has_left(r) for r in replica)
        ]
        return tuple(index for _, index in sorted(free))

    def state_of(self, rank: int) -> RankState:
        """ROLLOUT -> IDLE -> TRAINING -> DONE; back to IDLE only where a session was lost."""
        if self.is_over:
            return RankState.DONE
        if rank not in self.finished:
            return RankState.ROLLOUT
        is_in = rank in self.members() and not self.has_left(rank) and not self.is_closed
        return RankState.TRAINING if is_in else RankState.IDLE

    def ranks_in(self, state: RankState) -> list[int]:
        """All ranks in `state`."""
        return [rank for rank in range(self.layout.world_size) if self.state_of(rank) == state]


class PhaseLog:
    """The log of one RL step's rollout phase, as one rank writes and reads it."""

    def __init__(
        self,
        store: dist.Store,
        layout: ReplicaLayout,
        step: int,
        rank: int,
        check_ranks: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_ranks` is called ahead of every `read`: it raises where a rank is lost and the run cannot go on."""
        self._check_ranks = check_ranks
        self.step = step
        self.rank = rank
        self.view = PhaseView(layout, machine_id())
        self._store = store
        self._log = SharedLog(store, f"{step}/log")

    def announce_finished(self) -> float:
        """This rank's rollouts have ended: all that a busy rank says. Returns when."""
        now = time.monotonic()
        self._log.append("finished", self.rank, self.view.machine, repr(now))
        return now

    def announce_ready(self) -> None:
        """This rank can take part in a session from now on."""
        self._log.append("ready", self.rank)

    def announce_left(self, epoch: int) -> None:
        """This rank is out of session `epoch`, which was not ended by a newer plan, and free for another."""
        self._log.append("left", self.rank, epoch)

    def propose(self, plan: Plan) -> None:
        """Put the plan forward; `read` tells whether it is the one."""
        self._log.append("plan", plan.epoch, plan.base_updates, *plan.replicas)

    def close(self) -> None:
        """No more sessions in this phase."""
        self._log.append("closed")

    def read(self) -> PhaseView:
        """The view with all that has been appended until now. `announce_finished` comes first."""
        self._check_ranks()
        lines = self._log.read()
        now = time.monotonic()
        for words in lines:
            self.view.apply(words, now)
        return self.view

    def rendezvous_log(self, epoch: int) -> SharedLog:
        """Where the members of session `epoch` answer the plan."""
        return SharedLog(self._store, f"{self.step}/rendezvous/{epoch}")

    def forget(self) -> None:
        """Remove the phase from the store, by one rank when all have left it."""
        for epoch in range(1, self.read().next_epoch):
            self.rendezvous_log(epoch).delete()
        self._log.delete()
