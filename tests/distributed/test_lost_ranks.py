"""What ranks say of one that never comes to a collective, or dies where no other sees its process.

tests/faults kills and freezes ranks of whole runs.
"""

from __future__ import annotations

import datetime
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.spot_phases import begin_phase, world_group
from tlt_megatron.runtime import heartbeat as heartbeat_module
from tlt_megatron.runtime.collectives import barrier
from tlt_megatron.runtime.heartbeat import Heartbeat, RanksLost, running_heartbeat
from tlt_megatron.runtime.job_store import open_job_store
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.rank_process import RankProcess
from tlt_megatron.runtime.stop import StopRequest

pytestmark = pytest.mark.waits

LONG_S = 300.0  # no test waits for it


@contextmanager
def one_rank(
    timeout_s: float, group_timeout_s: float = LONG_S
) -> Iterator[tuple[Group, Heartbeat]]:
    """A rank with its heartbeat, as the launcher runs it: it tells the others why it ends."""
    world = world_group()
    stop = StopRequest(world.rank)
    store = open_job_store(world, timeout_s)
    with running_heartbeat(store, world, timeout_s, group_timeout_s, stop) as heartbeat:
        try:
            with heartbeat.explaining(group_timeout_s):
                yield world, heartbeat
        except RanksLost as loss:
            stop.end(1, f"rank {world.rank} failed: {loss}")
            raise


def said(body: Callable[[], object]) -> Callable[[], str]:
    """Return the body with the text of its RanksLost as the result."""

    def run() -> str:
        try:
            body()
        except RanksLost as loss:
            return str(loss)
        return "nothing"

    return run


def wait(heartbeat: Heartbeat) -> None:
    """Until a rank is lost."""
    while True:
        heartbeat.check()
        time.sleep(0.01)


def test_a_collective_that_times_out_says_the_value_that_was_set_and_who_was_not_there() -> None:
    limit_s = 10.0  # time for the others to come

    def body() -> None:
        short = dist.new_group(timeout=datetime.timedelta(seconds=limit_s))
        with one_rank(LONG_S, limit_s) as (world, heartbeat):
            begin_phase(heartbeat, "ROLLOUT")
            barrier(world)
            if world.rank == 1:
                wait(heartbeat)
            begin_phase(heartbeat, "UPDATE")
            dist.barrier(short)

    first, late, last = run_ranks(3, said(body))
    for message in (first, last):
        assert "no answer within run.group_timeout_s=10 s" in message
        assert "not there yet: rank 1 (host " in message
        assert "in phase ROLLOUT" in message
        # Of two ranks in time, one may see the other end first.
        assert re.search(r"\(phase UPDATE\)(; seen in .*)?$", message)
    assert " failed: " in late
    assert "no answer within run.group_timeout_s=10 s" in late


@pytest.mark.parametrize(
    ("is_alone", "timeout_s", "end"),
    [
        (False, LONG_S, "is gone: its process ended in phase ROLLOUT"),
        (True, 10.0, "heartbeat_timeout_s=10 s in phase ROLLOUT: it does not answer"),
    ],
)
def test_a_rank_that_dies_is_named_at_once_or_after_the_timeout_if_it_was_alone_on_its_machine(
    is_alone: bool, timeout_s: float, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each rank believes that it is on a machine of its own, no other one sees its
    process.
    """

    def body() -> None:
        if is_alone:
            machine = f"machine {dist.get_rank()}"
            alone = functools.partial(RankProcess, machine=machine)
            monkeypatch.setattr(heartbeat_module, "RankProcess", alone)
        with one_rank(timeout_s) as (world, heartbeat):
            begin_phase(heartbeat, "ROLLOUT")
            barrier(world)
            if world.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            wait(heartbeat)

    for message in run_ranks(3, said(body), killed=(2,))[:2]:
        assert message.startswith("rank 2 (host ")
        assert message.endswith(end)
