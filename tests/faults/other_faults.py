"""Clocks that jump, stores that are slow or silent, weights that are NaN."""

from __future__ import annotations

from tests.faults.case import Case
from tests.faults.signal_faults import TRAINING, steps_done


def clock_jump(case: Case) -> None:
    """The wall clock of a rank jumps by up to a day, forwards or backwards: the run is the straight run."""
    case.draw_variant("plain", "spot", "spot")
    seconds = case.rng.choice([-1, 1]) * case.rng.choice([60.0, 3600.0, 86400.0])
    case.draw_moment("setup", *TRAINING, action="clock", amount=seconds)
    job = case.start()
    case.finish(job)
    case.expect_codes(job, 0)
    case.expect_straight()


def slow_store(case: Case) -> None:
    """Every message between a rank and the spot store takes up to 50 ms: the run is the straight run."""
    case.draw_variant("spot")
    delay_s = case.rng.choice([0.005, 0.02, 0.05])
    case.draw_moment("start", action="clock", amount=0.0, store_delay_s=delay_s)
    job = case.start()
    case.finish(job)
    case.expect_codes(job, 0)
    case.expect_straight()


def silent_store(case: Case) -> None:
    """The spot store answers rank 1 no more: the run goes on without it, or ends with a line that says so."""
    case.draw_variant("spot")
    phase = case.rng.choice(["rollout", "spot", "update"])
    plan = case.draw_moment(phase, action="silence", store_delay_s=0.0, rank=1, held_rank=-1)
    case.shutdown_timeout_s = 5.0
    job = case.start("run.group_timeout_s=60", "run.heartbeat_timeout_s=5")
    case.finish(job)
    if set(job.rank_codes.values()) == {0}:
        case.expect_straight()
        return
    case.expect_line(job, "store|rank 0")
    case.resume(at_least=steps_done(plan))


def nan_weights(case: Case) -> None:
    """A weight becomes NaN in the middle of the run: it ends with exit code 1, and the good checkpoints stay."""
    case.draw_variant("plain", "tensor")
    plan = case.draw_moment("rollout", "update", action="nan")
    job = case.start("run.num_steps=40")
    case.finish(job)
    case.expect_codes(job, 1, -15)
    case.expect_line(job, "finite|nan")
    case.resume(at_least=max(0, steps_done(plan) - 1))
