"""Spot training beside ranks that are silent, slow or have another clock: who trains, what is measured, what is said."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.spot_phases import Markers, begin_phase, make_spot, run_spot_ranks, world_group
from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.heartbeat import RanksLost, running_heartbeat
from tlt_megatron.runtime.job_store import open_job_store
from tlt_megatron.runtime.stop import StopRequest
from tlt_megatron.spot.session import SessionEnd, StopWatch
from tlt_megatron.spot.spot_trainer import SpotReport

pytestmark = pytest.mark.waits

TIMEOUT_S = 3.0


def test_a_session_goes_on_while_a_newcomer_still_measures(tmp_path: Path) -> None:
    """Rank 1 trains; rank 2 has finished and measures until rank 1 has made 12 more updates. It was planned in at once, and
    rank 1 waited for it."""
    markers = Markers(tmp_path)

    def body() -> SpotReport:
        rank = dist.get_rank()

        def before(count: int) -> None:
            size = spot.trainer.group.size
            if rank == 1 and count == 3:
                markers.set("trains")
            if rank == 1 and size == 1 and (tmp_path / "measures").exists():
                counts.append(count)
                if len(counts) == 12:
                    markers.set("measured")
            if size == 2:
                markers.set("joined")

        def measure(watch: StopWatch) -> None:
            if rank == 2:
                markers.set("measures")
                markers.await_("measured")

        counts: list[int] = []
        spot = make_spot(before=before, measure_candidate=measure)
        dist.barrier()
        if rank == 2:
            markers.await_("trains")
        if rank == 0:
            markers.await_("joined")
        report = spot.run_until_preempted(0)
        spot.sync_newest(world_group())
        return report

    reports = run_spot_ranks(3, body)
    sessions = [(s.members, s.end) for s in reports[1].sessions]
    assert sessions == [((1,), SessionEnd.REPLACED), ((1, 2), SessionEnd.STOPPED)]
    assert len(reports[1].sessions[0].stats) >= 12


def test_a_clock_that_jumps_an_hour_changes_nothing(tmp_path: Path) -> None:
    """Of one rank, forwards in one phase and backwards in the next: it ended the phase ("not finished 3600 s after ..."),
    or was counted as hours of idle time."""
    markers = Markers(tmp_path)

    def body() -> list[SpotReport]:
        rank, real = dist.get_rank(), time.time
        jump_s = 0.0

        def before(count: int) -> None:
            nonlocal jump_s
            if count >= 3 and spot.trainer.group.size == 2:
                jump_s = 0.0 if rank else (3600.0 if step == 0 else -3600.0)
                markers.set(f"jumped {step} {rank}")

        spot = make_spot(before=before, min_idle_replicas=2)
        time.time = lambda: real() + jump_s
        reports = []
        for step in range(2):
            dist.barrier()
            if rank == 2:
                for other in (0, 1):
                    markers.await_(f"jumped {step} {other}")
            reports.append(spot.run_until_preempted(step))
            spot.sync_newest(world_group())
        return reports

    for reports in run_spot_ranks(3, body):
        for report in reports:
            assert 0 <= report.used_s < 1800
            assert 0 <= report.stall_s < 1800
            assert report.num_broken == 0
    assert reports[0].used_s == 0  # of the last rank to finish


@pytest.mark.parametrize("victim", [0, 2])
def test_idle_ranks_name_a_rank_that_froze_while_it_generated(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is idle and trains, rank 0, which hosts the store, trains with it or is frozen; so is rank 2. A call to a
    frozen store does not return: then the heartbeat ends the process."""
    markers = Markers(tmp_path)
    others = {0, 1, 2} - {victim}

    def body() -> None:
        world = world_group()
        job_store = open_job_store(world, TIMEOUT_S)
        pids = gather_objects(os.getpid(), world)

        def before(count: int) -> None:
            if count == 3:
                markers.set("trains")

        def leave(code: int, text: str, *, is_shown: bool = True) -> None:
            (tmp_path / f"rank {world.rank} says").write_text(text)
            markers.set(f"rank {world.rank} has ended")
            for rank in others:
                markers.await_(f"rank {rank} has ended")
            os.kill(pids[victim], signal.SIGKILL)
            os._exit(code)

        try:
            with running_heartbeat(
                job_store, world, TIMEOUT_S, 60.0, StopRequest(world.rank)
            ) as heartbeat:
                monkeypatch.setattr("tlt_megatron.runtime.heartbeat.end_process", leave)
                store = job_store.part("spot")
                spot = make_spot(before=before, store=store, check_ranks=heartbeat.check)
                begin_phase(heartbeat, "ROLLOUT")
                while world.rank and heartbeat.beats.first_phase != "ROLLOUT":
                    time.sleep(0.01)
                barrier(world)
                if world.rank == victim:
                    markers.await_("trains")
                    os.kill(os.getpid(), signal.SIGSTOP)
                begin_phase(heartbeat, "WAIT")
                with heartbeat.explaining(60.0):
                    spot.run_until_preempted(0)
        except RanksLost as error:
            leave(1, f"the run ends: {error}")

    assert run_spot_ranks(3, body, killed=(0, 1, 2)) == [None] * 3
    for rank in others:
        text = (tmp_path / f"rank {rank} says").read_text()
        assert text.startswith(f"the run ends: rank {victim} (host ")
        assert "in phase ROLLOUT: its process is stopped" in text
