"""Model-parallel ranks stream all together or not at all, in any order of finishes, sessions and the end of the phase.

The rules are the real ones; the ranks are those of tests/faults/spot_machine.py.
"""

from __future__ import annotations

import random

import pytest

from tests.faults.spot_machine import SpotMachine
from tlt_megatron.spot.rank_state import ReplicaLayout


def run_phase(seed: int, model: tuple[int, int]) -> SpotMachine:
    """A phase of eight ranks in random order, which ends after some, all or none have streamed."""
    rng = random.Random(seed)
    machine = SpotMachine()
    machine.start(num_replicas=8, size=1, min_idle=rng.choice([1, 2]), model=model)
    finish_share = rng.choice([0.01, 0.03, 0.1])
    for _ in range(rng.choice([100, 300])):
        generating = [rank for rank in machine.ranks if rank.state == "generates"]
        if generating and rng.random() < finish_share:
            rank = rng.choice(generating)
            machine.append("finished", rank.rank, "here", repr(machine.now))
            rank.state = "finished"
        machine.act(rng.choice(machine.ranks))
        machine.now += 0.01
        machine.sessions_are_apart()
    machine.views_agree()
    if seed % 2:
        machine.settle()
    return machine


@pytest.mark.parametrize("model", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_peers_stream_together_or_not_at_all(model: tuple[int, int]) -> None:
    totals = [0, 0, 0]
    for seed in range(60):
        machine = run_phase(seed, model)
        if seed % 2 and not machine.truth.is_over:
            for rank, count in enumerate(machine.num_streamed):
                is_idle = machine.truth.finished.keys() >= set(machine.layout.peers_of(rank))
                assert count == is_idle, "no idle model is left out"
        machine.teardown()  # all leave the phase
        counts = machine.num_streamed
        for rank in range(8):
            assert {counts[peer] for peer in machine.layout.peers_of(rank)} == {counts[rank]}
        num_lines = sum(line[0] == "stream" for line in machine.lines)
        totals = [
            totals[0] + sum(counts),
            totals[1] + num_lines - sum(counts),
            totals[2] + len(machine.sessions),
        ]
    num_streamed, num_in_vain, num_sessions = totals
    assert num_streamed > 0
    assert num_in_vain > 0, "no phase ended while ranks waited for their peers"
    assert num_sessions > 0


def test_the_peers_of_a_rank_are_in_megatrons_order() -> None:
    layout = ReplicaLayout(8, tensor=2, pipeline=2)
    assert [layout.peers_of(rank) for rank in range(8)] == [
        *((0, 1, 4, 5), (0, 1, 4, 5), (2, 3, 6, 7), (2, 3, 6, 7)),
        *((0, 1, 4, 5), (0, 1, 4, 5), (2, 3, 6, 7), (2, 3, 6, 7)),
    ]
