"""Rollout phases whose replicas finish, join sessions and are lost in random order: who trains, and
how the log grows with 128 replicas.

The rules are the real ones. Real ranks follow them in tests/distributed/test_spot_schedules.py.
"""

from __future__ import annotations

import random

import pytest

from tests.phase_lines import MACHINE, make_ranks
from tlt_megatron.spot.coordinator import Coordinator, plan_growth
from tlt_megatron.spot.rank_state import PhaseView, Plan, ReplicaLayout

NUM_TICKS = 90  # turns of every rank that has finished, whatever their number
LAST_FINISH, LOSS, TICK_S = 50, 55, 0.05


class Rank:
    """What a rank that waits or trains says, from what it has read of the log."""

    def __init__(self, layout: ReplicaLayout, rank: int) -> None:
        self.rank = rank
        self.view = PhaseView(layout, MACHINE)
        self.coordinator = Coordinator(make_ranks(rank, layout, member_timeout_s=1.0))
        self.num_read = 0
        self.proposal: Plan | None = None  # decided on, not yet in the log: others may be faster

    def say(self, lines: list[list[str]], now: float, lost: set[int]) -> Plan | str:
        """Return a plan, "left" for a session that has ended, or nothing."""
        for line in lines[self.num_read :]:
            self.view.apply(line, now)
        self.num_read = len(lines)
        if plan := self.proposal:
            self.proposal = None
            return plan
        view, members = self.view, self.view.members()
        if view.has_left(self.rank):
            self.proposal = self.coordinator.plan_start(view, now)
        elif view.plan is None or view.listed_in(self.rank) != view.plan.epoch or lost & {*members}:
            return "left"
        elif self.rank == members[0]:
            return plan_growth(view) or ""
        return ""


def run_phase(num_replicas: int, seed: int) -> int:
    """All but one finish in random order, and one of a session dies. All that live must train in
    one session at the end. Returns the number of lines in the log.
    """
    layout, rng = ReplicaLayout(num_replicas), random.Random(seed)
    ranks = [Rank(layout, rank) for rank in range(num_replicas)]
    finish_at = {rank: rng.randrange(LAST_FINISH) for rank in range(1, num_replicas)}
    lines: list[list[str]] = []
    truth, lost = PhaseView(layout, MACHINE), set[int]()
    for tick in range(NUM_TICKS):
        now = 100 + tick * TICK_S
        if tick == LOSS:
            lost.add(rng.choice(truth.members()))
        for rank in rng.sample(ranks, num_replicas):
            said: list[tuple[object, ...]] = []
            if finish_at.get(rank.rank) == tick:
                said = [("finished", rank.rank, MACHINE, now), ("ready", rank.rank)]
            elif finish_at.get(rank.rank, tick) < tick and rank.rank not in lost:
                answer = rank.say(lines, now, lost)
                if isinstance(answer, Plan):
                    check_plan(answer, truth)
                    said = [("plan", answer.epoch, *answer.replicas)]
                elif answer:
                    said = [(answer, rank.rank, rank.view.listed_in(rank.rank))]
            for words in said:
                lines.append([str(word) for word in words])
                truth.apply(lines[-1], now)
    assert truth.plan is not None
    assert sorted(truth.plan.replicas) == sorted(finish_at.keys() - lost), lines
    return len(lines)


def check_plan(plan: Plan, truth: PhaseView) -> None:
    """A plan that counts lists each replica once, and none that generates or trains with others."""
    if plan.epoch == truth.next_epoch:
        before = truth.plan.replicas if truth.plan else ()
        grown = before if set(before) <= set(plan.replicas) else ()
        assert len(set(plan.replicas)) == len(plan.replicas)
        assert set(plan.replicas) <= {*grown, *truth.free_replicas()}


@pytest.mark.parametrize("num_replicas", [3, 6])
def test_all_that_live_train_in_one_session_after_a_loss(num_replicas: int) -> None:
    for seed in range(100):
        run_phase(num_replicas, seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_log_grows_with_the_replicas_and_not_with_their_square(seed: int) -> None:
    few, many = run_phase(32, seed), run_phase(128, seed)
    assert many < 8 * 128
    assert many < 2 * 4 * few  # four times the replicas; their square: 16 times
