"""Trains the drafter on idle ranks, until the end of the last rank's rollouts.

Each rank calls `run_until_preempted` when its rollouts finish, and all ranks together `sync_newest`
at the phase boundary. Before that there is no collective of all ranks, and none waits for a rank
that still generates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.drafter_trainer import DrafterStats, DrafterTrainer
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.spot.coordinator import Coordinator
from tlt_megatron.spot.rank_state import PhaseLog, Plan, SpotRanks
from tlt_megatron.spot.session import (
    GroupPool,
    SessionEnd,
    SessionRecord,
    SpotSession,
    StateVersion,
    StopWatch,
    version_of,
)

log = logging.getLogger(__name__)

# A rank with so many broken sessions in one phase stays idle: the network is probably at fault.
_MAX_BROKEN_SESSIONS = 5
_KEPT_NCCL_GROUPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotReport:
    """One rollout phase of one rank."""

    used_s: float  # time in steps that were not abandoned, until the end of the last rollouts
    stall_s: float  # time from the end of the last rollouts until this rank was free
    preempt_ms: float  # stall_s in ms if the rank was in a session at that time; else 0
    sessions: tuple[SessionRecord, ...]  # sessions whose plans list this rank, broken ones included
    num_groups_formed: int = 0  # communicators, which sessions make as they grow

    @property
    def num_broken(self) -> int:
        """Return the number of sessions that lost a member or never began."""
        return sum(_is_broken(session) for session in self.sessions)

    @property
    def updates(self) -> tuple[DrafterStats, ...]:
        """Drafter updates of this rank's sessions. Losses were measured before each update."""
        return tuple(s for session in self.sessions for s in session.stats if not s.is_skipped)

    def metrics(self) -> dict[str, float]:
        """Return this rank's metrics, for `merge_metrics`."""
        updates = self.updates
        metrics = {
            "bubble/used_s": self.used_s,
            "bubble/stall_s": self.stall_s,
            "spot/epochs": float(sum(bool(session.stats) for session in self.sessions)),
            "spot/broken": float(self.num_broken),
            "spot/updates": float(len(updates)),
            "spot/preempt_ms": self.preempt_ms,
            "spot/groups_formed": float(self.num_groups_formed),
            "spot/out_of_memory": float(
                sum(stats.is_out_of_memory for session in self.sessions for stats in session.stats)
            ),
        }
        if updates:
            metrics["drafter/loss"] = sum(s.loss for s in updates) / len(updates)
            lengths = [s.accept_length for s in updates]
            metrics["drafter/accept_length"] = sum(lengths) / len(updates)
        return metrics


def merge_metrics(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine `SpotReport.metrics` of all ranks. An update of several members counts once."""
    merged = dict(max(ranks, key=lambda rank: rank["spot/updates"]))
    for name in merged.keys() - {"drafter/loss", "drafter/accept_length"}:
        combine = sum if name in ("bubble/used_s", "spot/out_of_memory") else max
        merged[name] = combine(rank[name] for rank in ranks)
    return merged


class SpotTrainer:
    """Runs the sessions of this rank. All ranks create one, with the same layout."""

    def __init__(
        self,
        trainer: DrafterTrainer,
        source: DataBuffer,
        *,
        ranks: SpotRanks,
        timeline: Timeline,
        measure_candidate: Callable[[StopWatch], None] | None = None,
    ) -> None:
        """Each rank that is not the last to finish calls `measure_candidate` once, before training.

        It gets a StopWatch: when that returns True, the last rollout has ended and it must return.
        """
        self.trainer = trainer
        self.source = source
        self.ranks = ranks
        self.timeline = timeline
        # Pauses between two reads of the store. It answers about ten thousand requests per second,
        # and all idle ranks poll it.
        self.poll_s = max(0.002, 0.0001 * ranks.layout.world_size)
        # During a step, at a tenth of the rate: a session has many steps.
        self.watch_s = max(0.002, 0.001 * ranks.layout.world_size)
        self._measure_candidate = measure_candidate
        self._groups = GroupPool(
            ranks,
            trainer.device,
            max_kept=_KEPT_NCCL_GROUPS if trainer.device.type == "cuda" else 0,
        )
        self._level: StateVersion | None = None  # the version of all ranks after the last phase
        self._left_phases: list[PhaseLog] = []  # phases that are still in the store
        if ranks.layout.num_replicas == 1:
            log.warning("spot.enabled=true: with one rollout replica no session will ever start")

    def run_until_preempted(self, step: int, generation_round: int = 0) -> SpotReport:
        """Train from the end of this rank's rollouts of a round of `step` to the last rank's end.

        RuntimeError names the ranks that do not finish within `phase_timeout_s` after the first, or
        rank 0 if its store does not answer. The loss of another rank only ends its session.
        """
        ranks = self.ranks
        phase_log = PhaseLog(ranks, step, generation_round)
        phase_log.announce_finished()
        num_formed = self._groups.num_formed
        self._left_phases.append(phase_log)
        watch = StopWatch(phase_log, self.watch_s)
        if self._measure_candidate is not None and not watch():
            with self.timeline.span("IDLE", step=step):
                self._measure_candidate(watch)
        phase_log.append("ready", ranks.rank)
        coordinator = Coordinator(ranks)
        records: list[SessionRecord] = []
        while (plan := self._await_plan(phase_log, coordinator, records)) is not None:
            if self._train(plan, phase_log, records) == SessionEnd.STOPPED:
                break
        with self.timeline.span("PREEMPT", step=step):
            return self._report(phase_log, records, self._groups.num_formed - num_formed)

    def sync_newest(self, world: Group) -> StateVersion:
        """Give all ranks the drafter with the most updates, and its optimizer. A collective.

        Call it after every phase: the next phase starts from this drafter, and this call also
        cleans up the store. After the first call, only sessions may change the trainer's state.
        RuntimeError names ranks that end with another drafter.
        """
        counts = gather_objects(self.trainer.num_updates, world)
        source = counts.index(max(counts))
        is_level = self._level is not None and set(counts) == {self._level.num_updates}
        if not is_level:
            # The checksum comes after the broadcast, on all ranks at once.
            with self.trainer.in_group(world):
                self.trainer.broadcast_state(source)
            held = gather_objects(version_of(self.trainer), world)
            strays = [rank for rank, version in enumerate(held) if version != held[source]]
            if strays:
                raise RuntimeError(
                    f"ranks {strays} do not hold the drafter that rank {source} sent to all"
                )
            self._level = held[source]
        assert self._level is not None
        self._groups.trim()
        if world.is_first:
            for phase_log in self._left_phases:  # all ranks have left them for this call
                phase_log.forget()
        self._left_phases.clear()
        return self._level

    def _await_plan(
        self, phase_log: PhaseLog, coordinator: Coordinator, records: list[SessionRecord]
    ) -> Plan | None:
        """Wait until a new plan lists this rank, or propose one. None: the phase is over."""
        newest_epoch = records[-1].epoch if records else 0
        num_broken = sum(_is_broken(record) for record in records)
        started = time.monotonic()
        with self.timeline.span("IDLE", step=phase_log.step):
            while True:
                view = phase_log.read()
                if view.is_over:
                    return None
                plan, listed = view.plan, view.listed_in(self.ranks.rank)
                if plan is not None and plan.epoch == listed > newest_epoch:
                    return plan
                if not view.has_left(self.ranks.rank) and num_broken < _MAX_BROKEN_SESSIONS:
                    # The session that listed this rank goes on without it, or has ended.
                    phase_log.append("left", self.ranks.rank, listed)
                    continue
                now = time.monotonic()
                proposal = coordinator.plan_start(view, now)
                if proposal is not None:
                    phase_log.propose(proposal)
                    continue
                # Poll less often with time: the rank that hosts the store may still generate.
                pause_s = max(self.poll_s, 0.01 * (now - started))
                time.sleep(min(pause_s, 5 * self.poll_s))

    def _train(self, plan: Plan, phase_log: PhaseLog, records: list[SessionRecord]) -> SessionEnd:
        """Take part in the session of `plan`, and add its record."""
        session = SpotSession(
            plan=plan,
            phase_log=phase_log,
            trainer=self.trainer,
            source=self.source,
            groups=self._groups,
            poll_s=self.poll_s,
            watch_s=self.watch_s,
        )
        records.append(session.record)
        members = len(session.members)
        with self.timeline.span(
            "DRAFT-TRAIN", step=phase_log.step, epoch=plan.epoch, members=members
        ):
            return session.run()

    def _report(
        self, phase_log: PhaseLog, records: list[SessionRecord], num_groups_formed: int
    ) -> SpotReport:
        ended_at = phase_log.read().ended_at
        steps = [step for record in records for step in record.steps]
        stall_s = max(0.0, time.monotonic() - ended_at)
        was_training = bool(records) and records[-1].end == SessionEnd.STOPPED
        return SpotReport(
            used_s=sum(max(0.0, min(end, ended_at) - start) for start, end in steps),
            stall_s=stall_s,
            preempt_ms=stall_s * 1e3 if was_training else 0.0,
            sessions=tuple(records),
            num_groups_formed=num_groups_formed,
        )


def _is_broken(record: SessionRecord) -> bool:
    return record.end in (SessionEnd.LOST, SessionEnd.CANCELLED)
