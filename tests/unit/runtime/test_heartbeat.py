"""Which ranks are watched by which, and when a neighbour counts as lost. Beats are played by hand,
so no test waits for a clock.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist

from tlt_megatron.runtime.collective_errors import describe_collective_error, is_collective_error
from tlt_megatron.runtime.events import Event, EventKind, EventLog
from tlt_megatron.runtime.heartbeat import Heartbeat, watched_by
from tlt_megatron.runtime.job_store import JobStore
from tlt_megatron.runtime.rank_process import RankProcess, state_of
from tlt_megatron.runtime.stop import StopRequest


class Neighbours:
    """Two ranks on two machines (no process is seen) or on one.

    Rank 0 watches rank 1, whose beats are played here.
    """

    def __init__(self, *, is_local: bool = False) -> None:
        store = JobStore(dist.HashStore())
        own = RankProcess(rank=0)
        other = replace(own, rank=1, machine=own.machine if is_local else "elsewhere", host="far")
        self.beats = store.part("heartbeat")
        self.other_beat(1)
        self.stop = StopRequest()
        self.heartbeat = Heartbeat(store, [own, other], 0, self.stop, timeout_s=8.0)

    def other_beat(self, count: int) -> None:
        self.beats.set("beat/1", f"{count} 4 ROLLOUT")

    def watch(self, num_beats: int) -> str:
        """The loss that is known after so many beats of rank 0."""
        for _ in range(num_beats):
            self.heartbeat._watch(self.heartbeat._watched[0])
        return str(self.heartbeat.loss or "")


def test_each_rank_watches_the_next_of_its_machine_and_machines_watch_each_other() -> None:
    machines = ["a", "a", "a", "b", "b", "c"]
    watched = [watched_by(rank, machines) for rank in range(6)]
    assert watched == [(1, 3), (2,), (0,), (4, 5), (3,), (0,)]
    assert watched_by(0, ["a"]) == ()
    large = [f"node {rank // 8}" for rank in range(256)]
    all_watched = [other for rank in range(256) for other in watched_by(rank, large)]
    assert set(all_watched) == set(range(256))
    assert max(len(watched_by(rank, large)) for rank in range(256)) == 2


def test_silence_is_counted_in_own_beats_so_ranks_that_were_frozen_together_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neighbours = Neighbours()
    neighbours.watch(3)
    for clock in ("time", "monotonic"):
        real = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda real=real: real() + 3600.0)
    assert neighbours.watch(3) == ""


def test_a_process_of_this_machine_that_computes_is_alive_though_it_does_not_beat() -> None:
    neighbours = Neighbours(is_local=True)
    for _ in range(12):
        until = time.process_time() + 0.03  # the operating system counts in hundredths
        while time.process_time() < until:
            pass
        assert neighbours.watch(1) == ""


def test_the_first_event_of_an_end_counts() -> None:
    neighbours = Neighbours()
    events = EventLog(neighbours.beats)
    for text in ("rank 7 (host x, pid 3) is gone", "the connection to rank 7 is lost"):
        events.append(Event(kind=EventKind.END, rank=1, code=2, text=f"{text}\nand more"))
    neighbours.heartbeat._read_events()
    neighbours.watch(20)
    assert str(neighbours.heartbeat.loss) == "rank 7 (host x, pid 3) is gone and more"
    assert neighbours.heartbeat.loss.code == 2
    assert not neighbours.stop.is_requested
    events.append(Event(kind=EventKind.STOP, rank=1, text="SIGTERM"))
    neighbours.heartbeat._read_events()
    assert neighbours.stop.is_requested


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_clock_that_is_set_makes_no_process_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux computes the boot time from the wall clock: it changes when NTP sets the clock."""
    own = psutil.Process()
    created_s = own.create_time()
    boot_s = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_s + 1.0)
    assert psutil.Process().create_time() == created_s + 1.0
    assert not state_of(own).is_gone


def test_errors_of_collectives_are_said_in_our_words() -> None:
    timeout = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 90000ms")
    closed = RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")
    assert is_collective_error(timeout)
    assert is_collective_error(closed)
    assert not is_collective_error(RuntimeError("shape '[2]' is invalid for input of size 3"))
    reward = "reward.function='judge.py:score' failed on prompt_id='7': Traceback (most recent call last):"
    reward += "\nConnectionResetError: [Errno 104] Connection reset by peer"
    assert not is_collective_error(RuntimeError(reward))
    text, is_timeout = describe_collective_error(timeout, 90.0)
    assert is_timeout
    assert text == "a collective: no answer within run.group_timeout_s=90 s"
    assert describe_collective_error(closed, 90.0)[1] is False
    silent_store = RuntimeError("spot: rank 0 does not answer: Socket Timeout")
    silent_store.__cause__ = dist.DistNetworkError("Socket Timeout")
    assert is_collective_error(silent_store)
    text, is_timeout = describe_collective_error(silent_store, 90.0)
    assert (text, is_timeout) == ("a collective: the job's store does not answer", False)
