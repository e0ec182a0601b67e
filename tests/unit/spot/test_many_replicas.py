"""A rollout phase of 128 replicas that finish, join, train and are lost in random order: what
holds, and what it costs.

The rules are the real ones; tests/spot_machine.py says in few words what a rank does with them.
Costs are counted, not timed: lines that ranks append to the phase's log, and reads of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tests.spot_machine import Rank, SpotMachine
from tlt_megatron.spot.rank_state import PhaseView

NUM_TICKS = 60  # turns of every rank that is awake, whatever their number
NUM_LOST = 3


class CountingMachine(SpotMachine):
    """Counts what the ranks ask of the store."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def read(self, rank: Rank) -> PhaseView:
        """See `SpotMachine`."""
        self.num_reads += 1
        return super().read(rank)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one phase has asked of the store."""

    lines: int
    reads: int


def run_phase(num_replicas: int, seed: int) -> Cost:
    """All but one finish in random order, spread over the phase; three ranks die while they
    train.
    """
    machine = CountingMachine()
    machine.start(num_replicas=num_replicas, size=1, min_idle=1)
    rng = random.Random(seed)
    finish_at = {rank: rng.randrange(NUM_TICKS - 10) for rank in range(1, num_replicas)}
    losses = rng.sample(range(NUM_TICKS // 3, NUM_TICKS), NUM_LOST)
    for tick in range(NUM_TICKS):
        for rank in machine.ranks:
            if finish_at.get(rank.rank) == tick:
                machine.append("finished", rank.rank, "here", repr(machine.now))
                rank.state = "finished"
        for rank in rng.sample(machine.ranks, len(machine.ranks)):
            machine.act(rank)
        machine.now += 0.05
        training = [rank for rank in machine.ranks if rank.state == "trains"]
        if tick in losses and training:
            rng.choice(training).state = "dead"
        machine.sessions_are_apart()
    machine.views_agree()
    cost = Cost(lines=len(machine.lines), reads=machine.num_reads)
    machine.settle()  # all that live train, in one session
    machine.teardown()
    return cost


@pytest.mark.parametrize("seed", [0, 1])
def test_work_grows_with_the_replicas_and_not_with_their_square(seed: int) -> None:
    few, many = run_phase(32, seed), run_phase(128, seed)
    assert many.lines < 8 * 128
    assert many.lines < 2 * 4 * few.lines  # four times the replicas; their square: 16 times
    assert many.reads < 2 * 4 * few.reads
