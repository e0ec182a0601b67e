"""State of all ranks in a rollout phase: an append-only log in the store, and a view of it.

The store orders the appends, so ranks that have read the same lines hold the same view. A rank
appends one line when its rollouts finish, and nothing before. Then it is idle, until a plan lists
it and it trains. The phase is over when all ranks have finished.

Times are seconds of the reader's monotonic clock. Ranks of one machine share it, so the view uses
the times that they report. For a rank of another machine it uses the time when the line was first
read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from tlt_megatron.runtime.rank_process import machine_id


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """Rollout replicas of neighbouring ranks, which join sessions together. The first plans."""

    world_size: int
    replica_size: int = 1

    def __post_init__(self) -> None:
        assert self.world_size % self.replica_size == 0, self

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.replica_size

    def ranks_of(self, *replicas: int) -> tuple[int, ...]:
        """Return all ranks of the replicas with these indices."""
        size = self.replica_size
        return tuple(rank for i in replicas for rank in range(i * size, (i + 1) * size))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotRanks:
    """This rank among all ranks of spot training, for the whole run."""

    store: dist.Store  # a part of the job store (runtime/job_store.py)
    layout: ReplicaLayout
    rank: int  # this one
    phase_timeout_s: float  # most time from the first finished rollout of a phase to the last
    min_idle_replicas: int = 1  # sessions start when so many replicas are idle
    member_timeout_s: float = 20.0  # a member silent for this long is lost; > one drafter step
    # Called before every read of a log. Raises if a rank is lost and the run cannot continue.
    check_ranks: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The members of a session, valid until the next plan."""

    epoch: int  # 1, 2, ... within a phase; the first plan in the log for an epoch counts
    replicas: tuple[int, ...]  # in the order in which they became idle


class SharedLog:
    """Lines under one key of the store. RuntimeError names rank 0 if it does not answer."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self.key = key
        self._store = store
        self._num_read = 0

    def append(self, *words: object) -> None:
        """Append a line, with one store operation."""
        line = " ".join(map(str, words)) + "\n"
        try:
            # Not in torch's stubs.
            self._store.append(self.key, line)  # pyright: ignore[reportAttributeAccessIssue]
        except dist.DistError as error:
            raise _store_lost(error) from error

    def read_lines(self) -> list[list[str]]:
        """Return the lines since the last call, with one store operation. `append` comes first."""
        try:
            text = self._store.get(self.key)
        except dist.DistError as error:
            raise _store_lost(error) from error
        lines = text[self._num_read :].decode().splitlines()
        self._num_read = len(text)
        return [line.split() for line in lines]

    def delete(self) -> None:
        """Remove the log. No rank may read it afterwards."""
        self._store.delete_key(self.key)


def _store_lost(error: dist.DistError) -> RuntimeError:
    reason = str(error).splitlines()[0] if str(error) else repr(error)
    return RuntimeError(
        f"spot: rank 0, which hosts the store of spot training, does not answer: {reason}"
    )


class PhaseView:
    """The state that the lines of a log describe. Equal lines give equal views, except for times.

    finished RANK MACHINE TIME    its rollouts have finished
    ready RANK                    it can join a session from now on
    plan EPOCH REPLICA..          a session
    left RANK EPOCH               it has left this session, and can join another
    """

    def __init__(self, layout: ReplicaLayout, machine: str = "") -> None:
        self.layout = layout
        self.machine = machine
        self.finished: dict[int, float] = {}  # rank -> time, in the order of the log
        self.ready: set[int] = set()  # ranks that can join a session
        self.plan: Plan | None = None  # the newest
        self._listed: dict[int, int] = {}  # rank -> epoch of the newest plan that lists it
        self._left: dict[int, int] = {}  # rank -> newest epoch that it reported as left

    def apply(self, words: list[str], now: float) -> None:
        """Apply one line, first read at `now`."""
        match words:
            case ["finished", rank, machine, finished_at]:
                is_near = machine == self.machine
                self.finished.setdefault(int(rank), float(finished_at) if is_near else now)
            case ["ready", rank]:
                self.ready.add(int(rank))
            case ["plan", epoch, *replicas] if int(epoch) == self.next_epoch:
                self.plan = Plan(epoch=int(epoch), replicas=tuple(map(int, replicas)))
                self._listed.update(dict.fromkeys(self.members(), self.plan.epoch))
            case ["plan", *_]:
                pass  # another plan was first
            case ["left", rank, epoch]:
                self._left[int(rank)] = max(int(epoch), self._left.get(int(rank), 0))
            case _:
                raise AssertionError(words)

    @property
    def next_epoch(self) -> int:
        return 1 if self.plan is None else self.plan.epoch + 1

    @property
    def is_over(self) -> bool:
        """Return whether the rollouts of all ranks have finished."""
        return len(self.finished) == self.layout.world_size

    @property
    def unfinished(self) -> list[int]:
        """Return the ranks that still generate."""
        return [rank for rank in range(self.layout.world_size) if rank not in self.finished]

    @property
    def ended_at(self) -> float:
        """Return the latest finish time so far; once `is_over`, the end of the last rollout."""
        return max(self.finished.values())

    @property
    def first_finished_at(self) -> float:
        return min(self.finished.values())

    def members(self) -> tuple[int, ...]:
        """Return the ranks in the newest plan; the first one leads the session."""
        return self.layout.ranks_of(*self.plan.replicas) if self.plan else ()

    def listed_in(self, rank: int) -> int:
        """Return the epoch of the newest plan that lists `rank`, or 0."""
        return self._listed.get(rank, 0)

    def has_left(self, rank: int) -> bool:
        """Return whether `rank` has left the newest session that lists it, or was never listed."""
        return self._left.get(rank, 0) >= self.listed_in(rank)

    def free_replicas(self) -> tuple[int, ...]:
        """Return the replicas whose ranks are all ready and in no session, first idle first."""
        size = self.layout.replica_size
        num_free: Counter[int] = Counter()  # free ranks of each replica
        free = []
        for rank in self.finished:
            if rank in self.ready and self.has_left(rank):
                num_free[rank // size] += 1
                if num_free[rank // size] == size:
                    free.append(rank // size)
        return tuple(free)

    def check_deadline(self, step: int, now: float, phase_timeout_s: float) -> None:
        """Raise if ranks still generate `phase_timeout_s` after the first rank finished."""
        waited_s = now - self.first_finished_at
        if self.unfinished and waited_s > phase_timeout_s:
            raise RuntimeError(
                f"spot: ranks {self.unfinished} have not finished the rollouts of RL step {step}"
                f" {waited_s:.0f} s after the first rank did (at most {phase_timeout_s:g} s)"
            )


class PhaseLog(SharedLog):
    """One rank's access to the log of one rollout phase: a generation round of an RL step."""

    def __init__(self, ranks: SpotRanks, step: int, generation_round: int = 0) -> None:
        self.name = f"{step}-{generation_round}" if generation_round else str(step)
        super().__init__(ranks.store, f"{self.name}/log")
        self.step = step
        self.rank = ranks.rank
        self.view = PhaseView(ranks.layout, machine_id())
        self.ranks = ranks

    def announce_finished(self) -> None:
        self.append("finished", self.rank, self.view.machine, repr(time.monotonic()))

    def propose(self, plan: Plan) -> None:
        """Append a plan. The next `read` shows whether it was the first for its epoch."""
        self.append("plan", plan.epoch, *plan.replicas)

    def read(self) -> PhaseView:
        """Return the view of all lines so far. Call `announce_finished` first.

        RuntimeError names lost ranks, and ranks that still generate after the deadline.
        """
        self.ranks.check_ranks()
        lines = self.read_lines()
        now = time.monotonic()
        for words in lines:
            self.view.apply(words, now)
        self.view.check_deadline(self.step, now, self.ranks.phase_timeout_s)
        return self.view

    def rendezvous_log(self, epoch: int) -> SharedLog:
        """Return the log in which the members of session `epoch` answer the plan."""
        return SharedLog(self.ranks.store, f"{self.name}/rendezvous/{epoch}")

    def forget(self) -> None:
        """Remove the phase from the store. One rank calls it after all have left the phase."""
        for epoch in range(1, self.read().next_epoch):
            self.rendezvous_log(epoch).delete()
        self.delete()
