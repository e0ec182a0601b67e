"""Ranks that are killed at the worst moments: sessions end, the run goes on or ends with an error that names the rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.spot_phases import Markers, make_spot, run_spot_ranks
from tlt_megatron.spot.session import SessionEnd, StateVersion, version_of
from tlt_megatron.spot.spot_trainer import SpotReport, SpotTrainer

pytestmark = pytest.mark.waits

LONG_S = 60.0  # no test waits for it


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
    """Ranks 1, 2, 3 train, led by the first one. Rank 0, which keeps the store, generates; see below for its loss."""
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
        spot = make_spot(before=before, min_idle_replicas=2, member_timeout_s=LONG_S)
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


def test_others_take_over_from_a_lone_trainer_that_died(tmp_path: Path) -> None:
    """Nobody is in a group with it, so nobody notices but by its silence."""
    markers = Markers(tmp_path)

    def body() -> SpotReport:
        rank = dist.get_rank()

        def before(count: int) -> None:
            if count == 3:
                markers.set(f"rank {rank} trains")
                if rank == 2:
                    die()

        spot = make_spot(before=before, member_timeout_s=4.0)
        dist.barrier()
        if rank == 1:
            markers.await_("rank 2 trains")
        if rank == 0:
            markers.await_("rank 1 trains")
        report = spot.run_until_preempted(0)
        outlive(markers, {0, 1})
        return report

    report = run_spot_ranks(3, body, killed=(2,))[1]
    assert ends(report) == [((1,), "stopped")]
    assert report.sessions[0].epoch == 2


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

        def hook(operation: str, name: str) -> None:
            if rank == 2 and key in name:
                markers.set("dies")
                die()

        def before(count: int) -> None:
            if (tmp_path / "dies").exists():
                counts.append(count)
                if len(counts) == 3:
                    markers.set("trains")

        counts: list[int] = []
        spot = make_spot(hook=hook, before=before, min_idle_replicas=2, member_timeout_s=4.0)
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


def test_a_decoding_rank_that_died_is_named_within_the_timeout(tmp_path: Path) -> None:
    def body() -> str:
        rank = dist.get_rank()
        spot = make_spot(phase_timeout_s=6.0)
        dist.barrier()
        if rank == 2:
            die()
        with pytest.raises(RuntimeError) as caught:
            spot.run_until_preempted(3)
        outlive(Markers(tmp_path), {0, 1})
        return str(caught.value)

    *messages, _ = run_spot_ranks(3, body, killed=(2,))
    for message in messages:
        assert "ranks [2] have not finished the rollouts of RL step 3" in message


@pytest.mark.parametrize("state", ["decoding", "training", "leading"])
def test_loss_of_rank_0_which_hosts_the_store_is_an_error_on_all(
    state: str, tmp_path: Path
) -> None:
    """Rank 3 still generates then: it learns of it when it has finished."""
    markers = Markers(tmp_path)

    def body() -> str:
        rank = dist.get_rank()

        def before(count: int) -> None:
            if count == 5 and rank == (1 if state == "decoding" else 0):
                markers.set("trains")
                if rank == 0:
                    die()

        spot = make_spot(before=before, member_timeout_s=LONG_S)
        dist.barrier()
        if rank == 0 and state == "decoding":
            markers.await_("trains")
            die()
        if rank == (1 if state == "leading" else 0) and state != "decoding":
            time.sleep(0.1)  # the other one leads
        if rank == 3:
            markers.await_("trains")
            time.sleep(0.1)
        with pytest.raises(RuntimeError) as caught:
            spot.run_until_preempted(0)
        return str(caught.value)

    _, *messages = run_spot_ranks(4, body, killed=(0,))
    for message in messages:
        assert "rank 0, which hosts the store of spot training, does not answer" in message


def test_an_error_of_one_member_is_its_own_and_frees_the_others(tmp_path: Path) -> None:
    markers = Markers(tmp_path)

    def body() -> SpotReport | None:
        rank = dist.get_rank()

        def before(count: int) -> None:
            if rank == 1 and spot.trainer.group.size == 2:
                raise OSError("no data")
            if rank == 2 and count >= 5 and spot.trainer.group.size == 1:
                markers.set("trains on")

        spot: SpotTrainer = make_spot(before=before, member_timeout_s=LONG_S)
        dist.barrier()
        if rank == 0:
            markers.await_("trains on")
        if rank != 1:
            report = spot.run_until_preempted(0)
        else:
            with pytest.raises(OSError, match="no data"):
                spot.run_until_preempted(0)
            report = None
        dist.barrier()
        return report

    _, _, report = run_spot_ranks(3, body)
    members = [set(session.members) for session in report.sessions if session.stats]
    assert {2} in members
    assert "stopped" in [end for _, end in ends(report)]
