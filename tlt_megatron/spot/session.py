"""One session of drafter training by a fixed set of ranks: answer the plan, form a group, broadcast, train, leave together.

spot_trainer.py creates it on every rank that the newest plan lists. Two rules prevent deadlocks:
- A member leaves only on flags that were reduced with the gradients, never on what it reads from the store itself.
- A group is formed only after every member has answered the plan.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
import torch.distributed as dist

from tlt_megatron.drafter.packing import DraftBatch
from tlt_megatron.drafter.trainer import DrafterStats, DrafterTrainer
from tlt_megatron.runtime.process_groups import (
    SINGLE,
    Group,
    MemberLost,
    PrivateHandle,
    forget_private_group,
    form_private_group,
)
from tlt_megatron.spot.coordinator import Coordinator, check_deadline
from tlt_megatron.spot.rank_state import PhaseLog, Plan, SharedLog
from tlt_megatron.spot.state_version import StateVersion, version_of

log = logging.getLogger(__name__)

_NO_GROUP = "-"
_NO_DATA_WAIT_S = 0.005  # between steps while no member has training data
_WATCH_SHARE = 10.0  # shortest time between two reads, in multiples of the time of a read


class BatchSource(Protocol):
    """Source of a member's training batches."""

    def next_batch(self) -> DraftBatch | None:
        """Return the next batch on the drafter's device, or None if there is no data."""
        ...

    def put_back(self) -> None:
        """Undo the last `next_batch`, for a batch that was not trained on."""
        ...


class SessionEnd(StrEnum):
    """How a session ended for this member. Except for LOST, all members end after the same step."""

    STOPPED = "stopped"  # the last rollout has ended
    REPLACED = "replaced"  # by a newer plan
    FULL = "full"  # the phase has reached spot.max_updates
    CANCELLED = "cancelled"  # not every member answered the plan, or the phase ended before that
    LOST = "lost"  # a member exited or does not answer


@dataclass(slots=True, kw_only=True)
class SessionRecord:
    """Record of one session, filled in while it runs."""

    epoch: int
    members: tuple[int, ...]
    end: SessionEnd | None = None  # None: still running, or ended by an error on this rank
    steps: list[tuple[float, float]]  # monotonic start and end seconds, without abandoned steps
    stats: list[DrafterStats]  # of each step; the same on all members


class GroupPool:
    """Private process groups of this rank, by member set. Keeps `max_kept` of them for later sessions of the same members.

    NCCL communicators are slow to create, so they are kept; a gloo group takes a millisecond. After a normal end a group
    stays open until later groups replace it or `trim` runs: a peer may still read its last reduction.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        device: torch.device,
        *,
        timeout_s: float,
        max_kept: int,
    ) -> None:
        self._store = store
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._max_kept = max_kept
        self._groups: dict[frozenset[int], tuple[str, Group]] = {}  # in order of use
        self._forgettable: list[tuple[str, Group]] = []

    def name_of(self, members: Sequence[int]) -> str:
        """Return the name of the kept group of `members`, or "-"."""
        name, _ = self._groups.get(frozenset(members), (_NO_GROUP, None))
        return name

    def obtain(self, members: Sequence[int], name: str) -> Group:
        """Return the group called `name`, kept or new. A collective of all members."""
        key = frozenset(members)
        if self.name_of(members) != name:
            self.drop(members)
            group = form_private_group(
                self._store, name, members, self._rank, self._device, self._timeout_s
            )
            self._groups[key] = (name, group)
            self._forgettable.append((name, group))
        self._groups[key] = self._groups.pop(key)
        self._close_oldest(max(2, self._max_kept))
        return self._groups[key][1]

    def drop(self, members: Sequence[int]) -> None:
        """Close the broken group of `members` now. This releases the members that wait in it."""
        _, group = self._groups.pop(frozenset(members), (_NO_GROUP, SINGLE))
        if isinstance(group.handle, PrivateHandle):
            group.handle.close()

    def trim(self) -> None:
        """Close all but the last `max_kept` groups, and remove the keys of all groups from the store.

        Call it only when all sessions have ended on all ranks.
        """
        self._close_oldest(self._max_kept)
        for name, group in self._forgettable:
            forget_private_group(self._store, group, name)
        self._forgettable.clear()

    def _close_oldest(self, num_left: int) -> None:
        for members in list(self._groups)[: max(0, len(self._groups) - num_left)]:
            self.drop(tuple(members))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of a session. Times are in seconds."""

    max_updates: int  # per phase; 0: no limit
    member_timeout_s: float  # a member that does not answer for this long is lost
    phase_timeout_s: float  # from the first finished rollout to the last
    poll_s: float  # between two reads of the store
    watch_s: float  # the same during a step; 0: read at every point where a step can be abandoned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Result of the rendezvous."""

    is_go: bool
    source: int = 0  # the rank that holds the newest drafter
    is_level: bool = False  # all members hold the same drafter already
    group_name: str = _NO_GROUP


class SpotSession:
    """This rank's part in one session."""

    def __init__(
        self,
        plan: Plan,
        *,
        phase_log: PhaseLog,
        coordinator: Coordinator,
        trainer: DrafterTrainer,
        source: BatchSource,
        groups: GroupPool,
        limits: SessionLimits,
        after_update: Callable[[StopWatch], None] | None = None,
    ) -> None:
        """Only the leader calls `after_update`, while the others wait in their next reduction.

        Its argument says whether the last rollout has ended; then it must return soon.
        """
        self.plan = plan
        self.after_update = after_update
        self.members = phase_log.view.layout.ranks_of(plan)
        self.phase_log = phase_log
        self.coordinator = coordinator
        self.trainer = trainer
        self.source = source
        self.groups = groups
        self.limits = limits
        self.record = SessionRecord(epoch=plan.epoch, members=self.members, steps=[], stats=[])

    @property
    def is_leader(self) -> bool:
        """Return whether this member reads the store for the whole session."""
        return self.phase_log.rank == self.members[0]

    def run(self) -> SessionEnd:
        """Take part until the session ends. An error other than MemberLost is raised, after the group was closed."""
        try:
            self.record.end = self._run()
        except MemberLost as error:
            log.warning(
                "spot: session %d of RL step %d with ranks %s ended after %d steps: %s",
                self.plan.epoch,
                self.phase_log.step,
                list(self.members),
                len(self.record.steps),
                error,
            )
            self.record.end = SessionEnd.LOST
        finally:
            self.trainer.group = SINGLE
            if self.record.end in (None, SessionEnd.LOST):
                self.groups.drop(self.members)
        return self.record.end

    def _run(self) -> SessionEnd:
        verdict = self._rendezvous()
        if not verdict.is_go:
            return SessionEnd.CANCELLED
        group = self.groups.obtain(self.members, verdict.group_name)
        self.trainer.group = group
        if not verdict.is_level:
            self.trainer.broadcast_state(group.global_ranks.index(verdict.source))
        return self._train()

    def _rendezvous(self) -> _Verdict:
        """Answer the plan with this rank's drafter version, and wait for the verdict: the first one in the log counts."""
        answers: dict[int, tuple[StateVersion, str]] = {}
        answers_log = self.phase_log.rendezvous_log(self.plan.epoch)
        own = version_of(self.trainer)
        kept = self.groups.name_of(self.members)
        answers_log.append("here", self.phase_log.rank, own.num_updates, own.checksum, kept)
        deadline = time.monotonic() + self.limits.member_timeout_s
        while True:
            for kind, *words in answers_log.read():
                if kind == "here":
                    rank, num_updates, checksum = map(int, words[:3])
                    version = StateVersion(num_updates=num_updates, checksum=checksum)
                    answers[rank] = (version, words[3])
                elif kind == "go":
                    return self._verdict(answers, source=int(words[0]), group_name=words[1])
                else:
                    return _Verdict(is_go=False)
            self._advance_rendezvous(answers_log, answers, time.monotonic() >= deadline)

    def _advance_rendezvous(
        self, answers_log: SharedLog, answers: dict[int, tuple[StateVersion, str]], is_late: bool
    ) -> None:
        """Append a verdict if one is due, else wait `poll_s`."""
        if len(answers) == len(self.members) and self.is_leader:
            source = max(self.members, key=lambda rank: answers[rank][0].num_updates)
            names = {name for _, name in answers.values()}
            fresh = f"{self.phase_log.step}.{self.plan.epoch}"
            answers_log.append(
                "go", source, fresh if len(names) > 1 or _NO_GROUP in names else names.pop()
            )
            return
        view = self.phase_log.read()
        if is_late or view.is_over or view.is_closed:
            missing = sorted(set(self.members) - answers.keys())
            if is_late:
                log.warning(
                    "spot: ranks %s did not answer plan %d of RL step %d within %g s",
                    missing,
                    self.plan.epoch,
                    self.phase_log.step,
                    self.limits.member_timeout_s,
                )
            answers_log.append("cancel", *missing)
            return
        time.sleep(self.limits.poll_s)

    def _verdict(
        self, answers: dict[int, tuple[StateVersion, str]], source: int, group_name: str
    ) -> _Verdict:
        versions = {version for version, _ in answers.values()}
        return _Verdict(
            is_go=True, source=source, is_level=len(versions) == 1, group_name=group_name
        )

    def _train(self) -> SessionEnd:
        watch = StopWatch(self.phase_log, self.limits.watch_s)
        flags = _LateFlags(
            self._read_flags if self.is_leader else lambda: (float(watch.is_over), 0.0)
        )
        while True:
            batch = self.source.next_batch()
            started = time.monotonic()
            stats = self.trainer.step(batch, flags, watch)
            if not watch.is_over:
                self.record.steps.append((started, time.monotonic()))
            elif batch is not None:
                self.source.put_back()
            self.record.stats.append(stats)
            is_stopped, is_replaced = (flag > 0 for flag in stats.flags)
            if is_stopped:
                return SessionEnd.STOPPED
            if self.is_leader and self.after_update is not None and not stats.is_skipped:
                self.after_update(watch)
            num_done = stats.num_updates - self.plan.base_updates
            if 0 < self.limits.max_updates <= num_done:
                self.phase_log.close()  # every member closes before it continues
                return SessionEnd.FULL
            if is_replaced:
                return SessionEnd.REPLACED
            if not stats.num_tokens:
                time.sleep(_NO_DATA_WAIT_S)

    def _read_flags(self) -> tuple[float, float]:
        """Return the leader's flags of this step: whether the phase is over, and whether there is a newer plan."""
        view = self.phase_log.read()
        check_deadline(view, self.phase_log.step, time.monotonic(), self.limits.phase_timeout_s)
        plan = None
        if view.next_epoch == self.plan.epoch + 1:
            plan = self.coordinator.plan_growth(view)
            if plan is not None:
                self.phase_log.propose(plan)
        is_replaced = plan is not None or view.next_epoch > self.plan.epoch + 1
        return (float(view.is_over), float(is_replaced))


class StopWatch:
    """Returns whether the last rollout has ended. Called during work that is abandoned in that case.

    Every member of a session reads the store for itself, but leaves only on the reduced flags, which include its own. An
    abandoned pass adds nothing to the gradient, and the step counts for the members that finished their passes.
    """

    def __init__(self, phase_log: PhaseLog, watch_s: float) -> None:
        self.is_over = False
        self._phase_log = phase_log
        self._watch_s = watch_s
        self._next_at = 0.0
        self._read_s = math.inf  # time of a read

    def __call__(self) -> bool:
        asked = time.monotonic()
        if asked >= self._next_at and not self.is_over:
            self.is_over = self._phase_log.read().is_over
            now = time.monotonic()
            # Training must not wait for a slow store. One slow read must not delay the next for long.
            self._read_s = min(now - asked, 2.0 * self._read_s)
            if self._watch_s:
                self._next_at = now + max(self._watch_s, _WATCH_SHARE * self._read_s)
        return self.is_over


class _LateFlags(Collection[float]):
    """Flags that are computed when `DrafterTrainer.step` reads them: after the backward pass, just before the reduction.

    So an event during a step ends the session with that step, not with the next one.
    """

    def __init__(self, look: Callable[[], tuple[float, float]]) -> None:
        self._look = look

    def __len__(self) -> int:
        return 2

    def __contains__(self, value: object) -> bool:
        return value in tuple(self)

    def __iter__(self) -> Iterator[float]:
        return iter(self._look())
