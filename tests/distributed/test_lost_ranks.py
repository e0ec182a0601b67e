"""Ranks that die, freeze, fail or never come to a collective: what the others say, and that they
end.
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.spot_phases import Markers, begin_phase, world_group
from tlt_megatron.runtime import rank_process
from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.heartbeat import Heartbeat, RanksLost, running_heartbeat
from tlt_megatron.runtime.job_store import open_job_store
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.stop import StopRequest

pytestmark = pytest.mark.waits

TIMEOUT_S = 3.0  # of heartbeats, where a rank is silent for longer
LONG_S = 60.0  # no test waits for it


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def await_phase_of_rank_0(heartbeat: Heartbeat, phase: str) -> None:
    """When its store is gone it is too late to ask."""
    while heartbeat.status.rank and heartbeat.beats.first_phase != phase:
        time.sleep(0.01)


@contextmanager
def one_rank(
    timeout_s: float, group_timeout_s: float = LONG_S
) -> Iterator[tuple[Group, Heartbeat, StopRequest]]:
    """A rank with its heartbeat, as the launcher runs it: it tells the others of a failure in the
    body.
    """
    world = world_group()
    stop = StopRequest(world.rank)
    store = open_job_store(world, timeout_s)
    with (
        running_heartbeat(store, world, timeout_s, group_timeout_s, stop) as heartbeat,
        _telling(stop),
        heartbeat.explaining(group_timeout_s),
    ):
        yield world, heartbeat, stop


@contextmanager
def _telling(stop: StopRequest) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        stop.end(1, f"rank {stop._rank} failed: {type(error).__name__}: {error}")
        raise


def said(body: Callable[[], object]) -> Callable[[], str]:
    """Return the body with the text of its RanksLost or OSError as the result."""

    def run() -> str:
        try:
            body()
        except (RanksLost, OSError) as error:
            return str(error)
        return "nothing"

    return run


def wait(heartbeat: Heartbeat, until: Callable[[], bool] = lambda: False) -> None:
    while not until():
        heartbeat.check()
        time.sleep(0.01)


def what_they_say(
    victim: int,
    end: Callable[[], None],
    folder: Path,
    *,
    waits_in: str,
    killed: tuple[int, ...],
    timeout_s: float = LONG_S,
) -> list[str | None]:
    """Three ranks; `victim` ends itself in phase ROLLOUT, while the others poll ("store") or are in
    a collective.
    """
    markers = Markers(folder)

    def body() -> str:
        pids = gather_objects(os.getpid(), world_group())
        text = said(end_in_rollout)()
        rank = dist.get_rank()
        markers.set(f"rank {rank} has ended")
        if victim in killed and rank == max(r for r in range(3) if r not in killed):
            for other in set(range(3)) - {rank, victim, *killed}:
                markers.await_(f"rank {other} has ended")
            os.kill(pids[victim], signal.SIGKILL)
        return text

    def end_in_rollout() -> None:
        with one_rank(timeout_s) as (world, heartbeat, _):
            begin_phase(heartbeat, "ROLLOUT")
            await_phase_of_rank_0(heartbeat, "ROLLOUT")
            barrier(world)
            if world.rank == victim:
                end()
            begin_phase(heartbeat, "WAIT")
            if waits_in == "store":
                wait(heartbeat)
            gather_objects(0, world)

    return run_ranks(3, body, killed=killed)


@pytest.mark.parametrize("waits_in", ["store", "collective"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_dead_rank_is_named_with_host_and_phase(
    victim: int, waits_in: str, tmp_path: Path
) -> None:
    texts = what_they_say(victim, kill, tmp_path, waits_in=waits_in, killed=(victim,))
    assert texts[victim] is None
    for message in filter(None, texts):
        assert message.startswith(f"rank {victim} (host ")
        assert "is gone" in message
        assert "phase ROLLOUT" in message
        assert ("seen in gather_objects" in message) == (waits_in == "collective")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_rank_is_named_by_ranks_that_poll(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 hosts the store in a native thread: every call waits for it without end."""
    # On a busy machine a rank may need longer to end, and would be ended.
    monkeypatch.setattr("tlt_megatron.runtime.heartbeat._GRACE_S", 60.0)
    texts = what_they_say(
        victim, freeze, tmp_path, waits_in="store", killed=(victim,), timeout_s=TIMEOUT_S
    )
    for message in filter(None, texts):
        assert message.startswith(f"rank {victim} (host ")
        assert "silent for run.heartbeat_timeout_s=3 s in phase ROLLOUT" in message
        assert message.endswith("its process is stopped")


def test_a_rank_that_fails_tells_the_others_why(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("disk full")

    texts = what_they_say(1, fail, tmp_path, waits_in="store", killed=())
    told = "rank 1 failed: OSError: disk full"
    assert texts == [told, "disk full", told]


def test_a_collective_that_times_out_says_the_value_that_was_set_and_who_was_not_there() -> None:
    limit_s = 2.5

    def body() -> None:
        short = dist.new_group(timeout=datetime.timedelta(seconds=limit_s))
        with one_rank(LONG_S, limit_s) as (world, heartbeat, _):
            begin_phase(heartbeat, "ROLLOUT")
            barrier(world)
            if world.rank == 1:
                wait(heartbeat)
            begin_phase(heartbeat, "UPDATE")
            dist.barrier(short)

    first, late, last = run_ranks(3, said(body))
    for message in (first, last):
        assert "no answer within run.group_timeout_s=2.5 s" in message
        assert "not there yet: rank 1 (host " in message
        assert "in phase ROLLOUT" in message
        # Of two ranks in time, one may see the other end first.
        assert re.search(r"\(phase UPDATE\)(; seen in .*)?$", message)
    assert "failed: RanksLost: " in late
    assert "no answer within run.group_timeout_s=2.5 s" in late


def test_a_thread_that_holds_the_lock_of_python_ends_no_run() -> None:
    """A pure C call of longer than the timeout, as a large pickle may be: the thread cannot beat
    meanwhile.
    """
    timeout_s = 2.0

    def body() -> None:
        with one_rank(timeout_s) as (world, heartbeat, _):
            begin_phase(heartbeat, "CHECKPOINT")
            if world.rank == 1:
                started = time.monotonic()
                while time.monotonic() - started < 2 * timeout_s:
                    pow(7, 200_000, 10**40_000)  # one call of seconds would need a tuned number
            barrier(world)
            heartbeat.check()

    assert run_ranks(2, said(body)) == ["nothing"] * 2


def test_a_rank_that_dies_while_the_others_have_ended_is_named() -> None:
    """They wait for it in the last barrier of the run."""

    def body() -> None:
        with one_rank(LONG_S) as (world, heartbeat, _):
            begin_phase(heartbeat, "CHECKPOINT")
            if world.rank == 1:
                kill()

    texts = run_ranks(3, said(body), killed=(1,))
    for message in filter(None, texts):
        assert message.startswith("rank 1 (host ")
        assert "is gone: its process ended in phase" in message
    assert texts.count(None) == 1


def test_a_rank_that_dies_alone_on_its_machine_is_named_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank believes that it is on a machine of its own, so no other one sees its process."""

    def body() -> None:
        monkeypatch.setattr(rank_process, "machine_id", lambda: f"machine {dist.get_rank()}")
        with one_rank(TIMEOUT_S) as (world, heartbeat, _):
            begin_phase(heartbeat, "ROLLOUT")
            barrier(world)
            if world.rank == 2:
                kill()
            wait(heartbeat)

    for message in run_ranks(3, said(body), killed=(2,))[:2]:
        assert message.startswith("rank 2 (host ")
        assert message.endswith("heartbeat_timeout_s=3 s in phase ROLLOUT: it does not answer")


def test_a_request_to_stop_reaches_all_ranks_and_no_thread_outlives_the_run() -> None:
    def body() -> list[str]:
        with one_rank(LONG_S) as (world, heartbeat, stop):
            stop.begin_training()
            stop.listen()
            barrier(world)
            if world.rank == 1:
                # Threads of gloo, older than this one, do not block the signal.
                signal.pthread_kill(stop._thread.ident, signal.SIGTERM)
            wait(heartbeat, lambda: stop.is_requested)
            assert "heartbeat" in [thread.name for thread in threading.enumerate()]
        stop.close()
        return [thread.name for thread in threading.enumerate()]

    for names in run_ranks(3, body):
        assert not {"heartbeat", "stop-listener"} & set(names)
