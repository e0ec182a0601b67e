"""Trains the drafter on idle ranks, from the end of a rank's own rollouts to the end of the last rank's.

The RL trainer calls it in every RL step: `run_until_preempted` on each rank when its rollouts finish, and `sync_newest` on
all ranks together at the phase boundary. Before the last rank finishes there is no collective of all ranks, and no rank waits
for a rank that still generates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from tlt_megatron.config.schema import SpotSection
from tlt_megatron.drafter.trainer import DrafterStats, DrafterTrainer
from tlt_megatron.runtime.process_groups import SINGLE, Group
from tlt_megatron.spot.coordinator import Coordinator, check_deadline
from tlt_megatron.spot.rank_state import PhaseLog, Plan, ReplicaLayout
from tlt_megatron.spot.session import (
    BatchSource,
    GroupPool,
    SessionEnd,
    SessionLimits,
    SessionRecord,
    SpotSession,
    StopWatch,
)
from tlt_megatron.spot.state_version import UNKNOWN, StateVersion, gather_versions, version_of

log = logging.getLogger(__name__)

_MAX_BROKEN_SESSIONS = (
    5  # of a rank in one phase; then it stays idle, since the network is probably at fault
)
_SETTLE_S = 0.25
_KEPT_NCCL_GROUPS = 4


class SpanRecorder(Protocol):
    """Records spans of the trace; implemented by runtime/timeline.py's Timeline."""

    def span(self, name: str, /, **args: object) -> AbstractContextManager[None]:
        """Record the time of the body as a span."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotReport:
    """One rollout phase of one rank. A rank on another machine counts as finished when this rank reads it in the log."""

    step: int
    idle_s: float  # from the end of this rank's rollouts to the end of the last rank's
    used_s: float  # the part of idle_s inside training steps that were not abandoned
    stall_s: float  # from the end of the last rollouts until this rank was free
    preempt_ms: float  # stall_s in ms if the rank was in a session at that time; else 0
    sessions: tuple[SessionRecord, ...]  # whose plans list this rank, broken sessions included

    @property
    def num_epochs(self) -> int:
        """Return the number of sessions that this rank trained in."""
        return sum(bool(session.stats) for session in self.sessions)

    @property
    def num_broken(self) -> int:
        """Return the number of sessions that lost a member or never began."""
        return sum(_is_broken(session) for session in self.sessions)

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks of the last session that this rank trained in."""
        return next((s.members for s in reversed(self.sessions) if s.stats), ())

    @property
    def updates(self) -> tuple[DrafterStats, ...]:
        """Return the drafter updates of this rank's sessions. Losses and acceptance are from before each update."""
        return tuple(s for session in self.sessions for s in session.stats if not s.is_skipped)

    @property
    def num_updates(self) -> int:
        """Return the number of drafter updates in this rank's sessions."""
        return len(self.updates)

    @property
    def losses(self) -> tuple[float, ...]:
        """Return the loss of each update."""
        return tuple(stats.loss for stats in self.updates)

    @property
    def accept_lengths(self) -> tuple[float, ...]:
        """Return the accept length of each update."""
        return tuple(stats.accept_length for stats in self.updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestDrafter:
    """The drafter of all ranks after `sync_newest`; the same on each, except for `seconds`."""

    source: int  # the rank that had it
    num_updates: int
    checksum: int
    num_receivers: int  # ranks that it was sent to; 0 if all were known to hold the same
    seconds: float  # that this rank spent in `sync_newest`


class SpotTrainer:
    """Runs the sessions of this rank for the whole run. All ranks create one, with the same layout, section and limits."""

    def __init__(
        self,
        trainer: DrafterTrainer,
        source: BatchSource,
        section: SpotSection,
        *,
        store: dist.Store,
        layout: ReplicaLayout,
        rank: int,
        device: torch.device,
        timeline: SpanRecorder,
        phase_timeout_s: float,
        check_ranks: Callable[[], None] = lambda: None,
        on_idle: Callable[[StopWatch], None] | None = None,
        after_update: Callable[[StopWatch], None] | None = None,
    ) -> None:
        """`store` is a part of the job store (runtime/job_store.py); `rank` is the global rank.

        `check_ranks` is called before every read of the log. It raises if a rank is lost and the run cannot continue.
        `on_idle` is called once per phase, before training, on each rank that is not the last to finish. `after_update` is
        called by the leader of a session after each drafter update. Both get a StopWatch: when it returns True, the last
        rollout has ended and they must return.
        """
        self.trainer = trainer
        self.source = source
        self._check_ranks = check_ranks
        self.on_idle = on_idle
        self.after_update = after_update
        self.section = section
        self.layout = layout
        self.rank = rank
        self.timeline = timeline
        self.limits = SessionLimits(
            max_updates=section.max_updates,
            member_timeout_s=section.member_timeout_s,
            phase_timeout_s=phase_timeout_s,
            # The store answers about ten thousand requests per second, and all idle ranks poll it.
            poll_s=max(0.002, 0.0001 * layout.world_size),
            watch_s=max(0.002, 0.001 * layout.world_size),  # a tenth of the rate, all session
        )
        self._store = store
        self._device = device
        self._groups = GroupPool(
            self._store,
            rank,
            device,
            timeout_s=section.member_timeout_s,
            max_kept=_KEPT_NCCL_GROUPS if device.type == "cuda" else 0,
        )
        self._level: StateVersion | None = None  # version on all ranks; None after a session
        self._left_phases: list[PhaseLog] = []  # phases that are still in the store
        if section.min_idle_replicas >= len(layout.replicas):
            log.warning(
                "spot.min_idle_replicas=%d: with %d rollout replicas no session will ever start",
                section.min_idle_replicas,
                len(layout.replicas),
            )

    def run_until_preempted(self, step: int) -> SpotReport:
        """Announce that this rank's rollouts of RL step `step` are finished, and train until those of all ranks are.

        RuntimeError names the ranks that do not finish within `phase_timeout_s` after the first, or rank 0 if its store does
        not answer. The loss of another rank only ends its session.
        """
        phase_log = PhaseLog(self._store, self.layout, step, self.rank, self._check_ranks)
        finished_at = phase_log.announce_finished()
        self._left_phases.append(phase_log)
        coordinator = Coordinator(
            self.layout,
            self.rank,
            min_idle_replicas=self.section.min_idle_replicas,
            settle_s=_SETTLE_S,
            member_timeout_s=self.limits.member_timeout_s,
        )
        watch = StopWatch(phase_log, self.limits.watch_s)
        if self.on_idle is not None and not watch():
            with self.timeline.span("IDLE", step=step):
                self.on_idle(watch)
        phase_log.announce_ready()
        records: list[SessionRecord] = []
        while (plan := self._await_plan(phase_log, coordinator, records)) is not None:
            session = SpotSession(
                plan,
                phase_log=phase_log,
                coordinator=coordinator,
                trainer=self.trainer,
                source=self.source,
                groups=self._groups,
                limits=self.limits,
                after_update=self.after_update,
            )
            records.append(session.record)
            self._level = None
            with self.timeline.span(
                "DRAFT-TRAIN", step=step, epoch=plan.epoch, members=len(session.members)
            ):
                end = session.run()
            if end == SessionEnd.STOPPED:
                break
        with self.timeline.span("PREEMPT", step=step):
            return self._report(phase_log, finished_at, records)

    def sync_newest(self, world: Group) -> NewestDrafter:
        """Give every rank the drafter with the most updates, optimizer state included. A collective of all ranks.

        Call it after every phase: the next phase starts from this drafter, and this call also cleans up the store. After the
        first call, only sessions may change the trainer's state. RuntimeError names ranks that end with another drafter.
        """
        started = time.perf_counter()
        count = self.trainer.num_updates
        own = self._level or StateVersion(num_updates=count, checksum=UNKNOWN)
        held = gather_versions(own, world, self._device)
        source = max(range(world.size), key=lambda rank: (held[rank].num_updates, -rank))
        is_level = own.checksum != UNKNOWN and all(version == own for version in held)
        if not is_level:
            # Broadcast first, then compute the checksum on all ranks at once, so that no rank waits for the sender's.
            self.trainer.group = world
            try:
                self.trainer.broadcast_state(source)
            finally:
                self.trainer.group = SINGLE
            held = gather_versions(version_of(self.trainer), world, self._device)
            strays = [rank for rank, version in enumerate(held) if version != held[source]]
            if strays:
                raise RuntimeError(
                    f"ranks {strays} do not hold the drafter that rank {source} sent to all"
                )
        self._level = held[source]
        self._clean_up(world)
        return NewestDrafter(
            source=source,
            num_updates=self._level.num_updates,
            checksum=self._level.checksum,
            num_receivers=0 if is_level else world.size - 1,
            seconds=time.perf_counter() - started,
        )

    def _await_plan(
        self, phase_log: PhaseLog, coordinator: Coordinator, records: list[SessionRecord]
    ) -> Plan | None:
        """Wait until a new plan lists this rank, and propose one if the rules allow. Returns None when the phase is over."""
        newest_epoch = records[-1].epoch if records else 0
        num_broken = sum(_is_broken(record) for record in records)
        started = time.monotonic()
        with self.timeline.span("IDLE", step=phase_log.step):
            while True:
                view = phase_log.read()
                if view.is_over:
                    return None
                check_deadline(view, phase_log.step, time.monotonic(), self.limits.phase_timeout_s)
                plan, listed = view.plan, view.listed_in(self.rank)
                is_mine = plan is not None and plan.epoch == listed > newest_epoch
                if is_mine and not view.is_closed:
                    return plan
                if not view.has_left(self.rank) and num_broken < _MAX_BROKEN_SESSIONS:
                    # The session that listed this rank goes on without it, or has ended.
                    phase_log.announce_left(listed)
                    continue
                now = time.monotonic()
                proposal = coordinator.plan_start(view, now, self.trainer.num_updates)
                if proposal is not None:
                    phase_log.propose(proposal)
                    continue
                # Waits at most 1 % longer, and polls less often: the rank that hosts the store may still generate.
                pause_s = max(self.limits.poll_s, 0.01 * (now - started))
                time.sleep(min(pause_s, 5 * self.limits.poll_s))

    def _report(
        self, phase_log: PhaseLog, finished_at: float, records: list[SessionRecord]
    ) -> SpotReport:
        ended_at = phase_log.read().ended_at
        steps = [step for record in records for step in record.steps]
        stall_s = max(0.0, time.monotonic() - ended_at)
        was_training = bool(records) and records[-1].end == SessionEnd.STOPPED
        return SpotReport(
            step=phase_log.step,
            idle_s=max(0.0, ended_at - finished_at),
            used_s=sum(max(0.0, min(end, ended_at) - start) for start, end in steps),
            stall_s=stall_s,
            preempt_ms=stall_s * 1e3 if was_training else 0.0,
            sessions=tuple(records),
        )

    def _clean_up(self, world: Group) -> None:
        """Remove past phases from the store. All ranks have left them for a world collective, so no rank reads them."""
        self._groups.trim()
        if world.is_first:
            for phase_log in self._left_phases:
                phase_log.forget()
        self._left_phases.clear()


def _is_broken(record: SessionRecord) -> bool:
    return record.end in (SessionEnd.LOST, SessionEnd.CANCELLED)
