"""The log of a phase: what a rank reads from it. All ranks read the same."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.phase_lines import FOUR, MACHINE, apply, make_view
from tlt_megatron.spot.rank_state import (
    PhaseLog,
    PhaseView,
    Plan,
    ReplicaLayout,
    SharedLog,
    SpotRanks,
)


def phase_log(store: dist.Store, step: int, rank: int) -> PhaseLog:
    return PhaseLog(SpotRanks(store=store, layout=FOUR, rank=rank, phase_timeout_s=60.0), step)


def test_first_plan_for_an_epoch_is_the_plan() -> None:
    view = make_view("finished 1 1.0", "finished 2 1.0", "plan 1 1", "plan 1 2", "plan 3 2")
    assert view.plan == Plan(epoch=1, replicas=(1,))
    assert (view.listed_in(1), view.listed_in(2)) == (1, 0)
    assert view.next_epoch == 2


def test_free_replicas_come_as_they_became_idle_and_whole() -> None:
    layout = ReplicaLayout(6, 2)
    lines = ["finished 5 1.0", "finished 0 1.1", "finished 1 1.2", "finished 4 1.3"]
    assert make_view(*lines[:2], layout=layout).free_replicas() == ()
    assert make_view(*lines[:3], layout=layout).free_replicas() == (0,)
    view = make_view(*lines, layout=layout)
    assert view.free_replicas() == (0, 2)
    apply(view, "plan 1 0")
    assert view.members() == (0, 1)
    assert view.free_replicas() == (2,)
    apply(view, "left 0 1")
    assert view.free_replicas() == (2,)  # rank 1 may be dead
    apply(view, "left 1 1")
    assert view.free_replicas() == (0, 2)


def test_a_rank_that_has_finished_is_free_once_it_is_ready() -> None:
    view = PhaseView(FOUR, MACHINE)
    view.apply(["finished", "2", MACHINE, "1.0"], now=1.1)
    assert view.free_replicas() == ()
    assert (view.unfinished, view.is_over) == ([0, 1, 3], False)
    view.apply(["ready", "2"], now=1.2)
    assert view.free_replicas() == (2,)


def test_times_of_other_machines_are_those_of_the_reader() -> None:
    view = PhaseView(FOUR, MACHINE)
    view.apply(["finished", "2", MACHINE, "50.0"], now=51.0)
    view.apply(["finished", "1", "elsewhere", "7000000.0"], now=60.0)
    view.apply(["finished", "0", "elsewhere", "3.0"], now=61.0)
    assert not view.is_over
    view.apply(["finished", "3", MACHINE, "55.0"], now=62.0)
    assert view.is_over
    assert view.first_finished_at == 50.0
    assert view.ended_at == 61.0


def test_having_left_an_old_session_does_not_count_for_a_new_one() -> None:
    view = make_view("finished 0 1.0", "plan 1 0", "left 0 1", "plan 2 0")
    assert view.free_replicas() == ()
    assert make_view("finished 0 1.0", "plan 1 0", "left 0 1").free_replicas() == (0,)


def test_log_gives_each_line_once() -> None:
    store = dist.HashStore()
    mine, other = (SharedLog(store, "log") for _ in range(2))
    mine.append("a", 1)
    other.append("b", 2)
    assert mine.read_lines() == [["a", "1"], ["b", "2"]]
    assert mine.read_lines() == []
    mine.append("c")
    assert mine.read_lines() == [["c"]]
    assert other.read_lines() == [["a", "1"], ["b", "2"], ["c"]]


def test_a_lost_store_names_rank_0() -> None:
    class Gone(dist.Store):
        def append(self, key, value):
            raise dist.DistNetworkError("Broken pipe")

        def get(self, key):
            raise dist.DistNetworkError("Connection reset by peer\nframe #0")

    log = phase_log(Gone(), step=1, rank=2)
    with pytest.raises(RuntimeError, match=r"rank 0, which hosts .* does not answer: Broken pipe"):
        log.announce_finished()
    with pytest.raises(RuntimeError, match=r"rank 0, .*: Connection reset by peer$"):
        log.read()
