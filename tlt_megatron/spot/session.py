"""One session of drafter training by fixed ranks: rendezvous, group, broadcast, train, leave.

spot_trainer.py creates it on every rank that the newest plan lists. Two rules prevent deadlocks:
- A member leaves only on flags that were reduced with the gradients, never on its own reads.
- A group is formed only after every member has answered the plan.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.drafter_trainer import DrafterStats, DrafterTrainer, Flags
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.runtime.process_groups import (
    SINGLE,
    Group,
    MemberLost,
    PrivateHandle,
    forget_private_group,
    form_private_group,
)
from tlt_megatron.spot.coordinator import plan_growth
from tlt_megatron.spot.rank_state import PhaseLog, Plan, SpotRanks

log = logging.getLogger(__name__)

_NO_GROUP = "-"
_LEVEL = -1  # instead of the rank with the newest drafter: all members hold the same one
_NO_DATA_WAIT_S = 0.005  # pause between steps while no member has training data
_WATCH_SHARE = 10.0  # shortest time between two reads, in multiples of the time of a read


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVersion:
    """Identifies the drafter of a rank: weights and optimizer state."""

    num_updates: int
    checksum: int


def version_of(trainer: DrafterTrainer) -> StateVersion:
    """Return the version of the trainer's state. Unequal states differ in it (63 bits)."""
    checksum = checksum_tensors(trainer.state_dict().items())
    return StateVersion(num_updates=trainer.num_updates, checksum=checksum)


class SessionEnd(StrEnum):
    """How a session ended for this member. Except for LOST, all members end after the same step."""

    STOPPED = "stopped"  # the last rollout has ended
    REPLACED = "replaced"  # by a newer plan
    CANCELLED = "cancelled"  # not every member answered the plan, or the phase ended before that
    LOST = "lost"  # a member exited or does not answer


@dataclass(slots=True, kw_only=True)
class SessionRecord:
    """Record of one session, filled in while it runs."""

    epoch: int
    members: tuple[int, ...]
    end: SessionEnd | None = None  # None: still running, or ended by an error on this rank
    # Monotonic start and end seconds, without abandoned steps.
    steps: list[tuple[float, float]] = field(default_factory=list)
    # One for each step, the same on all members.
    stats: list[DrafterStats] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class GroupPool:
    """Private process groups of this rank, by member set. Keeps `max_kept` of them.

    NCCL communicators are slow to create, so they are kept; a gloo group takes a millisecond. After
    a normal end a group stays open until later groups replace it or `trim` runs: a peer may still
    read its last reduction.
    """

    ranks: SpotRanks
    device: torch.device
    max_kept: int
    num_formed: int = 0  # communicators created so far; a group of one member needs no communicator
    _groups: dict[frozenset[int], tuple[str, Group]] = field(default_factory=dict)  # by last use
    _forgettable: list[tuple[str, Group]] = field(default_factory=list)

    def name_of(self, members: Sequence[int]) -> str:
        """Return the name of the kept group of `members`, or "-"."""
        name, _ = self._groups.get(frozenset(members), (_NO_GROUP, None))
        return name

    def obtain(self, members: Sequence[int], name: str) -> Group:
        """Return the group called `name`, kept or new. A collective of all members."""
        key = frozenset(members)
        if self.name_of(members) != name:
            self.drop(members)
            ranks = self.ranks
            group = form_private_group(
                ranks.store, name, members, ranks.rank, self.device, ranks.member_timeout_s
            )
            self.num_formed += group.size > 1
            self._groups[key] = (name, group)
            self._forgettable.append((name, group))
        self._groups[key] = self._groups.pop(key)
        self._close_oldest(max(2, self.max_kept))
        return self._groups[key][1]

    def drop(self, members: Sequence[int]) -> None:
        """Close the broken group of `members` now. This releases the members that wait in it."""
        _, group = self._groups.pop(frozenset(members), (_NO_GROUP, SINGLE))
        if isinstance(group.handle, PrivateHandle):
            group.handle.close()

    def trim(self) -> None:
        """Close all but the last `max_kept` groups, and remove the keys of all from the store.

        Call it only when all sessions have ended on all ranks.
        """
        self._close_oldest(self.max_kept)
        for name, group in self._forgettable:
            forget_private_group(self.ranks.store, group, name)
        self._forgettable.clear()

    def _close_oldest(self, num_left: int) -> None:
        for members in list(self._groups)[: max(0, len(self._groups) - num_left)]:
            self.drop(tuple(members))


@dataclass(kw_only=True, eq=False)
class SpotSession:
    """This rank's part in one session."""

    plan: Plan
    phase_log: PhaseLog
    trainer: DrafterTrainer
    source: DataBuffer
    groups: GroupPool
    poll_s: float  # pause between two reads of the store
    watch_s: float  # see StopWatch

    def __post_init__(self) -> None:
        self.members = self.phase_log.view.layout.ranks_of(*self.plan.replicas)
        self.record = SessionRecord(epoch=self.plan.epoch, members=self.members)

    @property
    def is_leader(self) -> bool:
        """Return whether this member reads the store for the whole session."""
        return self.phase_log.rank == self.members[0]

    def run(self) -> SessionEnd:
        """Take part until the session ends. Errors other than MemberLost are raised."""
        try:
            end = self.record.end = self._run()
        except MemberLost as error:
            log.warning(
                "spot: session %d of RL step %d with ranks %s ended after %d steps: %s",
                self.plan.epoch,
                self.phase_log.step,
                list(self.members),
                len(self.record.steps),
                error,
            )
            end = self.record.end = SessionEnd.LOST
        finally:
            if self.record.end in (None, SessionEnd.LOST):
                self.groups.drop(self.members)
        return end

    def _run(self) -> SessionEnd:
        verdict = self._rendezvous()
        if verdict is None:
            return SessionEnd.CANCELLED
        source, group_name = verdict
        group = self.groups.obtain(self.members, group_name)
        with self.trainer.in_group(group):
            if source != _LEVEL:
                self.trainer.broadcast_state(group.global_ranks.index(source))
            return self._train()

    def _rendezvous(self) -> tuple[int, str] | None:
        """Answer the plan, and wait for the verdict: the first one in the log counts.

        Returns the rank with the newest drafter (or _LEVEL) and the name of the group. None: the
        session does not begin.
        """
        log_of_answers = self.phase_log.rendezvous_log(self.plan.epoch)
        own = version_of(self.trainer)
        kept = self.groups.name_of(self.members)
        log_of_answers.append("here", self.phase_log.rank, own.num_updates, own.checksum, kept)
        timeout_s = self.phase_log.ranks.member_timeout_s
        deadline = time.monotonic() + timeout_s
        answers: dict[int, list[str]] = {}  # rank -> updates, checksum, name of the kept group
        while True:
            for kind, *words in log_of_answers.read_lines():
                if kind == "here":
                    answers[int(words[0])] = words[1:]
                elif kind == "go":
                    return int(words[0]), words[1]
                else:
                    return None
            if self.is_leader and len(answers) == len(self.members):
                log_of_answers.append("go", *self._decide(answers))
                continue
            view = self.phase_log.read()
            is_late = time.monotonic() >= deadline
            missing = sorted(set(self.members) - answers.keys())
            if is_late:
                log.warning(
                    "spot: ranks %s did not answer plan %d of RL step %d within %g s",
                    missing,
                    self.plan.epoch,
                    self.phase_log.step,
                    timeout_s,
                )
            if is_late or view.is_over:
                log_of_answers.append("cancel", *missing)
            else:
                time.sleep(self.poll_s)

    def _decide(self, answers: dict[int, list[str]]) -> tuple[int, str]:
        """Return the leader's verdict: the rank that sends its drafter to all, and the group."""
        versions = {(num_updates, checksum) for num_updates, checksum, _ in answers.values()}
        newest = max(self.members, key=lambda rank: int(answers[rank][0]))
        names = {name for _, _, name in answers.values()}
        is_kept = len(names) == 1 and _NO_GROUP not in names
        name = names.pop() if is_kept else f"{self.phase_log.name}.{self.plan.epoch}"
        return (_LEVEL if len(versions) == 1 else newest), name

    def _train(self) -> SessionEnd:
        watch = StopWatch(self.phase_log, self.watch_s)
        # Read just before the reduction, so an event during a step ends the session with that step.
        read_flags = self._read_flags if self.is_leader else lambda: (float(watch.is_over), 0.0)
        while True:
            batch = self.source.next_batch(self.trainer.batch_tokens)
            started = time.monotonic()
            stats = self.trainer.step(batch, read_flags, watch)
            if not watch.is_over:
                self.record.steps.append((started, time.monotonic()))
                if batch is not None:
                    self.source.mark_trained()
            self.record.stats.append(stats)
            is_stopped, is_replaced = (flag > 0 for flag in stats.flags)
            if is_stopped:
                return SessionEnd.STOPPED
            if is_replaced:
                return SessionEnd.REPLACED
            if not stats.num_tokens:
                time.sleep(_NO_DATA_WAIT_S)

    def _read_flags(self) -> Flags:
        """Return the leader's flags: whether the phase is over, and whether a newer plan exists."""
        view = self.phase_log.read()
        plan = None
        if view.next_epoch == self.plan.epoch + 1:
            plan = plan_growth(view)
            if plan is not None:
                self.phase_log.propose(plan)
        is_replaced = plan is not None or view.next_epoch > self.plan.epoch + 1
        return (float(view.is_over), float(is_replaced))


@dataclass(slots=True, eq=False)
class StopWatch:
    """Returns whether the last rollout has ended. Called during work that is then abandoned.

    Every member of a session reads the store for itself, but leaves only on the reduced flags,
    which include its own. An abandoned pass adds nothing to the gradient, and the step counts for
    the members that finished their passes.
    """

    phase_log: PhaseLog
    watch_s: float  # shortest pause between two reads; 0: read at every call
    is_over: bool = False
    _next_at: float = 0.0
    _read_s: float = math.inf  # time of a read

    def __call__(self) -> bool:
        asked = time.monotonic()
        if asked >= self._next_at and not self.is_over:
            self.is_over = self.phase_log.read().is_over
            now = time.monotonic()
            # Training must not wait for a slow store; one slow read must not delay the next much.
            self._read_s = min(now - asked, 2.0 * self._read_s)
            if self.watch_s:
                self._next_at = now + max(self.watch_s, _WATCH_SHARE * self._read_s)
        return self.is_over
