"""When sessions start, grow and are replaced, decided on views written by hand."""

from __future__ import annotations

import pytest

from tests.phase_lines import FOUR, make_ranks, make_view
from tlt_megatron.spot.coordinator import Coordinator
from tlt_megatron.spot.rank_state import Plan, ReplicaLayout


def make_coordinator(
    rank: int, *, min_idle_replicas: int = 1, layout: ReplicaLayout = FOUR
) -> Coordinator:
    settings = {"min_idle_replicas": min_idle_replicas, "member_timeout_s": 10.0}
    return Coordinator(make_ranks(rank, layout, **settings), settle_s=1.0)


def test_newcomer_waits_for_the_leader_but_not_for_ever() -> None:
    view = make_view("finished 3 1.0", "plan 1 3", "finished 1 1.0")
    coordinator = make_coordinator(1)
    assert coordinator.plan_start(view, 100.0) is None
    assert coordinator.plan_start(view, 109.9) is None
    plan = coordinator.plan_start(view, 110.1)
    assert plan == Plan(epoch=2, replicas=(1,))


def test_a_new_plan_restarts_the_wait() -> None:
    lines = ["finished 3 1.0", "plan 1 3", "finished 1 1.0", "finished 0 1.0", "plan 2 3 0"]
    coordinator = make_coordinator(1)
    assert coordinator.plan_start(make_view(*lines[:3]), 100.0) is None
    assert coordinator.plan_start(make_view(*lines), 109.0) is None
    assert coordinator.plan_start(make_view(*lines), 115.0) is None
    assert coordinator.plan_start(make_view(*lines), 119.1) is not None


def test_survivors_of_several_losses_wait_a_moment_for_each_other() -> None:
    lines = ["finished 0 1.0", "finished 1 1.0", "finished 2 1.0", "plan 1 0 1 2"]
    view = make_view(*lines, "left 1 1")
    coordinator = make_coordinator(1)
    assert coordinator.plan_start(view, 50.0) is None
    assert coordinator.plan_start(view, 50.9) is None
    assert coordinator.plan_start(view, 51.1).replicas == (1,)


def test_deadline_names_the_ranks_that_still_generate() -> None:
    view = make_view("finished 2 100.0", "finished 0 130.0")
    view.check_deadline(step=7, now=159.0, phase_timeout_s=60.0)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 3\] .* rollouts of RL step 7 61 s after"):
        view.check_deadline(step=7, now=161.0, phase_timeout_s=60.0)
    over = make_view(*(f"finished {rank} 100.0" for rank in range(4)))
    over.check_deadline(step=7, now=1000.0, phase_timeout_s=60.0)
