"""Every fault by name, with how often it is drawn, and the schedules of a seed."""

from __future__ import annotations

import logging
import random

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.checkpoint_machine import CheckpointMachine
from tests.faults import file_faults, process_faults, reward_faults
from tests.faults.case import Case


def checkpoint_folders(case: Case) -> None:
    """A schedule without a run: 12 sequences of up to 40 events. The same ones for the same
    seed.
    """
    logging.disable(logging.WARNING)  # each resume warns of what is broken, as it should
    case.verdict.where = "12 sequences"
    chosen = settings(
        max_examples=12,
        stateful_step_count=40,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(case.verdict.seed)(CheckpointMachine), settings=chosen)
    except (AssertionError, ValueError, ExceptionGroup) as error:
        case.verdict.lost.append("".join(getattr(error, "__notes__", [])) + str(error))


FAULTS = {  # what happens to a run, and in how many of 500 schedules, about
    "stop request": (process_faults.stop_request, 60),
    "second Ctrl-C": (process_faults.impatient_stop, 15),
    "rank killed": (process_faults.killed_rank, 45),
    "launcher killed": (process_faults.killed_launcher, 25),
    "all killed": (process_faults.killed_all, 25),
    "rank frozen briefly": (process_faults.short_freeze, 20),
    "rank frozen": (process_faults.long_freeze, 25),
    "two launchers": (process_faults.two_launchers, 15),
    "clock jump": (process_faults.clock_jump, 15),
    "store slow": (process_faults.slow_store, 8),
    "store silent": (process_faults.silent_store, 10),
    "crash while saving": (file_faults.crash_while_saving, 30),
    "crash while resuming": (file_faults.crash_while_resuming, 15),
    "disk full, one write": (file_faults.full_disk_while_saving, 20),
    "checkpoint damaged": (file_faults.damaged_checkpoint, 35),
    "pointer damaged": (file_faults.damaged_pointer, 12),
    "two runs": (file_faults.two_runs, 15),
    "reward fails": (reward_faults.reward_raises, 20),
    "reward fails, scored 0": (reward_faults.reward_zero, 15),
    "reward misbehaves": (reward_faults.reward_harmless, 20),
    "reward worker hit": (reward_faults.reward_worker, 12),
    "model: checkpoints": (checkpoint_folders, 18),
}
FAULTS_OF_ENVIRONMENTS = {  # with `--environments`
    **{name: fault for name, fault in FAULTS.items() if name != "model: checkpoints"},
    "worker of 64 conversations killed": (reward_faults.worker_in_conversations, 60),
}


def draw(count: int, seed: int, names: list[str] | None = None) -> list[tuple[str, int]]:
    """`count` schedules as (fault, seed of its own): every fault at least once where `count`
    allows, then by weight.

    The same arguments give the same schedules.
    """
    weights = {name: weight for name, (_, weight) in (FAULTS_OF_ENVIRONMENTS | FAULTS).items()}
    order = sorted(names or FAULTS, key=lambda name: -weights[name])
    total = sum(weights[name] for name in order)
    shares = {name: max(1, weights[name] * count // total) for name in order}
    for name in order * count:
        if sum(shares.values()) >= count:
            break
        shares[name] += 1
    schedules = [
        (name, seed * 100_000 + number) for name, n in shares.items() for number in range(n)
    ]
    random.Random(seed).shuffle(schedules)
    return schedules[:count]
