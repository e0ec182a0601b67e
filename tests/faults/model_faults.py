"""Schedules without a run: hypothesis drives the rules of spot sessions, and the checkpoint folder, from a seed."""

from __future__ import annotations

import logging

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.faults.case import Case


def spot_sessions(case: Case) -> None:
    """100 phases of up to 40 events each."""
    from tests.faults.spot_machine import SpotMachine

    _run(case, SpotMachine, 100)


def checkpoints(case: Case) -> None:
    """12 lives of a checkpoint folder of up to 40 events each."""
    from tests.faults.checkpoint_machine import CheckpointMachine

    logging.disable(logging.WARNING)  # each resume warns of what is broken, as it should
    _run(case, CheckpointMachine, 12)


def _run(case: Case, machine: type[RuleBasedStateMachine], num_examples: int) -> None:
    case.verdict.door = "model"
    case.verdict.where = f"{num_examples} sequences"
    try:
        run_machine(machine, num_examples, case.verdict.seed)
    except (AssertionError, ValueError, ExceptionGroup) as error:
        case.verdict.lost.append("".join(getattr(error, "__notes__", [])) + str(error))


def run_machine(machine: type[RuleBasedStateMachine], num_examples: int, number: int) -> None:
    """The same sequences for the same `number`; AssertionError with the shortest that breaks a rule."""
    chosen = settings(
        max_examples=num_examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(machine), settings=chosen)
