"""Members that are killed at the worst moments, or fail: the others train on. tests/faults kills
ranks of whole runs.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import LIMIT_S
from tests.spot_phases import Markers, make_spot, run_spot_ranks
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.spot.session import SessionEnd, StateVersion, version_of
from tlt_megatron.spot.spot_trainer import SpotReport, SpotTrainer

pytestmark = pytest.mark.waits


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def outlive(markers: Markers, ranks: set[int]) -> None:
    """Rank 0 keeps the store until all of `ranks` are through."""
    markers.set(f"rank {dist.get_rank()} is through")
    if dist.get_rank() == 0:
        for rank in ranks:
            markers.await_(f"rank {rank} is through")


def ends(report: SpotReport) -> list[tuple[tuple[int, ...], str]]:
    return [(session.members, session.end.value) for session in report.sessions]


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_survivors_of_a_lost_member_train_on(victim: int, tmp_path: Path) -> None:
    """Ranks 1, 2, 3 train, led by the first one. Rank 0, which keeps the store, generates."""
    markers = Markers(tmp_path)
    survivors = tuple(rank for rank in range(1, 4) if rank != victim)

    def body() -> tuple[SpotReport, StateVersion]:
        rank = dist.get_rank()

        def before(count: int) -> None:
            size = spot.trainer.group.size
            if size == 3 and rank == victim and spot.trainer.num_updates >= 4:
                die()
            if size == 2 and survivors[0] == rank and (tmp_path / "broken").exists():
                if count >= spot_count[0] + 5:
                    markers.set("recovered")
            elif size == 3:
                markers.set("broken")
                spot_count[0] = count

        spot_count = [0]
        spot = make_spot(before=before, min_idle_replicas=2, member_timeout_s=LIMIT_S)
        dist.barrier()
        if rank == 0:
            markers.await_("recovered")
        report = spot.run_until_preempted(7)
        outlive(markers, {0, *survivors})
        return report, version_of(spot.trainer)

    results = run_spot_ranks(4, body, killed=(victim,))
    reports = [results[rank][0] for rank in survivors]
    for report in reports:
        sessions = [session for session in report.sessions if session.stats]
        assert [session.end for session in sessions][-2:] == [SessionEnd.LOST, SessionEnd.STOPPED]
        lost, last = sessions[-2:]
        assert sorted(lost.members) == [1, 2, 3]
        assert sorted(last.members) == list(survivors)
        assert len(last.stats) >= 5
        # The update that failed has changed nothing: numbers go on from the last that all had.
        steps = [stats for stats in lost.stats + last.stats if not stats.is_skipped]
        updates = [stats.num_updates for stats in steps]
        assert updates == list(range(updates[0], updates[0] + len(updates)))
    versions = {results[rank][1] for rank in survivors}
    assert len(versions) == 1
    assert ends(results[0][0]) == []


@pytest.mark.parametrize(
    "key, end",
    [("rendezvous", SessionEnd.CANCELLED), ("group/", SessionEnd.LOST)],
    ids=["before it answers", "after all have answered"],
)
def test_a_member_that_dies_between_plan_and_group_is_left_out(
    key: str, end: SessionEnd, tmp_path: Path
) -> None:
    markers = Markers(tmp_path)

    def body() -> SpotReport:
        rank = dist.get_rank()

        def hook(name: str) -> None:
            if rank == 2 and key in name:
                markers.set("dies")
                die()

        def before(count: int) -> None:
            if (tmp_path / "dies").exists():
                counts.append(count)
                if len(counts) == 3:
                    markers.set("trains")

        counts: list[int] = []
        spot = make_spot(hook=hook, before=before, min_idle_replicas=2, member_timeout_s=15.0)
        dist.barrier()
        if rank == 0:
            markers.await_("trains")
        report = spot.run_until_preempted(0)
        outlive(markers, {0, 1, 3})
        return report

    reports = run_spot_ranks(4, body, killed=(2,))
    for rank in (1, 3):
        members, last = ends(reports[rank])[-1]
        assert (sorted(members), last) == ([1, 3], "stopped")
        # Rank 2 has trained in no session, whenever it was that a plan listed it.
        broken = [session for session in reports[rank].sessions if 2 in session.members]
        assert all(s.end in (end, SessionEnd.CANCELLED) and not s.steps for s in broken)


def test_an_error_of_one_member_is_its_own_and_frees_the_others(tmp_path: Path) -> None:
    markers = Markers(tmp_path)

    def body() -> SpotReport | None:
        rank = dist.get_rank()

        def before(count: int) -> None:
            if rank == 1 and spot.trainer.group.size == 2:
                raise OSError("no data")
            if rank == 2 and count >= 5 and spot.trainer.group.size == 1:
                markers.set("trains on")

        spot: SpotTrainer = make_spot(before=before, member_timeout_s=LIMIT_S)
        dist.barrier()
        if rank == 0:
            markers.await_("trains on")
        if rank != 1:
            report = spot.run_until_preempted(0)
        else:
            with pytest.raises(OSError, match="no data"):
                spot.run_until_preempted(0)
            assert spot.trainer.group is SINGLE
            report = None
        dist.barrier()
        return report

    _, _, report = run_spot_ranks(3, body)
    members = [set(session.members) for session in report.sessions if session.stats]
    assert {2} in members
    assert "stopped" in [end for _, end in ends(report)]
