"""Every fault by name, with how often it is drawn, and the schedules of a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults import (
    file_faults,
    model_faults,
    other_faults,
    reward_faults,
    signal_faults,
)
from tests.faults.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a run, and its share of the schedules."""

    name: str
    run: Callable[[Case], None]
    weight: int  # of 500 schedules, about


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(name="stop request", run=signal_faults.stop_request, weight=50),
        Fault(name="second Ctrl-C", run=signal_faults.impatient_stop, weight=15),
        Fault(name="rank killed", run=signal_faults.killed_rank, weight=40),
        Fault(name="agent killed", run=signal_faults.killed_agent, weight=20),
        Fault(name="all killed", run=signal_faults.killed_all, weight=25),
        Fault(name="rank frozen briefly", run=signal_faults.short_freeze, weight=20),
        Fault(name="rank frozen", run=signal_faults.long_freeze, weight=25),
        Fault(name="torchrun: stop", run=signal_faults.torchrun_stop, weight=12),
        Fault(name="torchrun: kill", run=signal_faults.torchrun_killed, weight=10),
        Fault(name="torchrun: two agents", run=signal_faults.two_agents, weight=10),
        Fault(name="crash while saving", run=file_faults.crash_while_saving, weight=35),
        Fault(name="disk full, one write", run=file_faults.full_disk_while_saving, weight=20),
        Fault(name="disk full", run=file_faults.full_disk, weight=20),
        Fault(name="checkpoint damaged", run=file_faults.damaged_checkpoint, weight=40),
        Fault(name="all damaged", run=file_faults.every_checkpoint_damaged, weight=10),
        Fault(name="pointer damaged", run=file_faults.damaged_pointer, weight=12),
        Fault(name="crafted pickle", run=file_faults.crafted_pickle, weight=6),
        Fault(name="used folder", run=file_faults.used_folder, weight=10),
        Fault(name="two runs", run=file_faults.two_runs, weight=15),
        Fault(name="reward fails", run=reward_faults.reward_raises, weight=20),
        Fault(name="reward fails, scored 0", run=reward_faults.reward_zero, weight=15),
        Fault(name="reward misbehaves", run=reward_faults.reward_harmless, weight=20),
        Fault(name="reward worker hit", run=reward_faults.reward_worker, weight=12),
        Fault(name="clock jump", run=other_faults.clock_jump, weight=15),
        Fault(name="store slow", run=other_faults.slow_store, weight=8),
        Fault(name="store silent", run=other_faults.silent_store, weight=10),
        Fault(name="NaN weights", run=other_faults.nan_weights, weight=10),
        Fault(name="model: spot sessions", run=model_faults.spot_sessions, weight=20),
        Fault(name="model: checkpoints", run=model_faults.checkpoints, weight=20),
    )
}


def draw(count: int, seed: int, names: list[str] | None = None) -> list[tuple[str, int]]:
    """`count` schedules as (fault, seed of its own): every fault at least once where `count` allows, then by weight.

    The same arguments give the same schedules.
    """
    chosen = [FAULTS[name] for name in names or FAULTS]
    total = sum(fault.weight for fault in chosen)
    shares = {fault.name: max(1, fault.weight * count // total) for fault in chosen}
    order = sorted(chosen, key=lambda fault: -fault.weight)
    for fault in order * count:
        if sum(shares.values()) >= count:
            break
        shares[fault.name] += 1
    schedules = [
        (name, seed * 100_000 + number) for name, n in shares.items() for number in range(n)
    ]
    random.Random(seed).shuffle(schedules)
    return schedules[:count] if len(schedules) > count else schedules
