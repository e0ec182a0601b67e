"""Signals to agents and ranks: asked to stop, killed, frozen."""

from __future__ import annotations

import signal
import time

from tests.faults.case import Case, Missed
from tests.faults.probe import Plan

PHASES = ("setup", "rollout", "spot", "update", "checkpoint", "evaluation", "finish")
TRAINING = PHASES[1:-1]
_LONG = "run.num_steps=40"  # has not ended when the fault comes, however late that is
_FROZEN = (
    "run.group_timeout_s=60",
    "run.heartbeat_timeout_s=5",  # below the other: who is frozen is known when a collective fails
    "reward.timeout_s=10",
)


def steps_done(plan: Plan) -> int:
    """RL steps whose weights exist at the moment of `plan`."""
    if plan.phase in ("rollout", "spot", "update"):
        return plan.step - 1
    return plan.step if plan.phase in ("checkpoint", "evaluation", "finish") else 0


def steps_saved(plan: Plan) -> int:
    """RL steps whose checkpoint stands at that moment, with one after each step."""
    done = steps_done(plan)
    return max(0, done - 1) if plan.phase in ("checkpoint", "evaluation") else done


def stop_request(case: Case) -> None:
    """SIGTERM, SIGINT or SIGUSR1 to the agent, to all ranks or to one: the run saves and ends with success."""
    case.draw_variant("plain", "plain", "tensor")
    number = case.rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    target = case.rng.choice(["agent", "ranks", "one rank"])
    plan = case.draw_moment(*PHASES)
    job = case.start()
    case.verdict.where += f" {number.name} to {target}"
    blows = {
        "agent": [(None, number)],
        "ranks": [(0, number), (1, number)],
        "one rank": [(case.rng.randrange(2), number)],
    }[target]
    case.strike(job, *blows)
    case.finish(job)
    if plan.phase != "setup":  # before, nothing is there to be saved, and any end will do
        case.expect_codes(job, 0)
        case.expect_no_traceback(job)
        case.expect_saved(steps_done(plan))
    case.resume(at_least=steps_done(plan) if plan.phase != "setup" else 0)


def impatient_stop(case: Case) -> None:
    """Ctrl-C twice: the second ends the run at once, and what was saved before is there."""
    case.draw_variant("plain", "tensor")
    plan = case.draw_moment(*TRAINING)
    job = case.start()
    ranks = [(0, signal.SIGINT), (1, signal.SIGINT)]
    case.strike(job, *ranks)
    time.sleep(case.rng.uniform(0.0, 0.05))
    for rank, number in ranks:
        job.signal_rank(rank, number)
    case.finish(job)
    case.resume(at_least=steps_saved(plan))


def killed_rank(case: Case) -> None:
    """SIGKILL to one rank: the other ends with a line that names it; the run resumes."""
    case.draw_variant()
    plan = case.draw_moment(*PHASES)
    victim = case.rng.randrange(2)
    job = case.start(*_FROZEN, *([_LONG] if plan.phase != "finish" else []))
    case.verdict.where += f" SIGKILL to rank {victim}"
    case.strike(job, (victim, signal.SIGKILL))
    case.finish(job)
    if job.rank_codes.get(victim) != -signal.SIGKILL:
        raise Missed("the rank had ended")
    if plan.phase not in ("setup", "finish"):
        case.expect_line(job, _naming(victim))
    case.resume(at_least=steps_saved(plan))


def killed_agent(case: Case) -> None:
    """SIGKILL to the agent: its ranks do not train on without it."""
    case.draw_variant()
    plan = case.draw_moment(*PHASES)
    job = case.start(_LONG)
    case.strike(job, (None, signal.SIGKILL))
    case.finish(job)
    case.resume(at_least=steps_saved(plan))


def killed_all(case: Case) -> None:
    """SIGKILL to everything at once, as a node that loses power but for its disk."""
    case.draw_variant()
    plan = case.draw_moment(*PHASES)
    job = case.start()
    case.strike(job, (0, signal.SIGKILL), (1, signal.SIGKILL), (None, signal.SIGKILL))
    case.finish(job)
    case.resume(at_least=steps_saved(plan))


def short_freeze(case: Case) -> None:
    """SIGSTOP, then SIGCONT: the run goes on and is the straight run."""
    case.draw_variant()
    case.draw_moment(*PHASES)
    victim = case.rng.randrange(2)
    job = case.start()
    case.verdict.where += f" rank {victim} frozen"
    case.strike(job, (victim, signal.SIGSTOP))
    time.sleep(case.rng.uniform(0.1, 1.0))
    job.signal_rank(victim, signal.SIGCONT)
    case.finish(job)
    case.expect_codes(job, 0)
    case.expect_no_traceback(job)
    case.expect_straight()


def long_freeze(case: Case) -> None:
    """SIGSTOP for good: the other rank ends within the timeouts, with a line that names the frozen one."""
    case.draw_variant()
    plan = case.draw_moment(*TRAINING)
    victim = case.rng.randrange(2)
    case.shutdown_timeout_s = 3.0
    job = case.start(*_FROZEN, _LONG)
    case.verdict.where += f" rank {victim} frozen"
    case.strike(job, (victim, signal.SIGSTOP))
    case.finish(job)
    if job.rank_codes.get(victim) == 0:
        raise Missed("the rank had ended")
    case.expect_line(job, _naming(victim))
    case.resume(at_least=steps_saved(plan))


def _naming(rank: int) -> str:
    return rf"ranks? \[?{rank}\b"


def torchrun_stop(case: Case) -> None:
    """SIGTERM, SIGINT or SIGUSR1 to launch/torchrun.py, as README starts a run."""
    case.draw_variant("plain", "spot")
    number = case.rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    plan = case.draw_moment(*PHASES[1:-1])
    job = case.start(is_torchrun=True)
    case.verdict.where += f" {number.name} to torchrun"
    case.strike(job, (None, number))
    case.finish(job)
    case.expect_codes(job, 0)
    case.expect_no_traceback(job)
    case.expect_saved(steps_done(plan))
    case.resume(at_least=steps_done(plan))


def torchrun_killed(case: Case) -> None:
    """SIGKILL to torchrun or to one of its ranks."""
    case.draw_variant("plain", "spot")
    plan = case.draw_moment(*PHASES)
    victim = case.rng.choice([None, 0, 1])
    job = case.start(*_FROZEN, _LONG, is_torchrun=True)
    case.verdict.where += f" SIGKILL to {'torchrun' if victim is None else f'rank {victim}'}"
    case.strike(job, (victim, signal.SIGKILL))
    case.finish(job)
    if victim is not None:
        case.expect_codes(job, 1, 128 + signal.SIGKILL)
        case.expect_line(job, _naming(victim) + rf"|rank\s*:\s*{victim}\b")
    case.resume(at_least=steps_saved(plan))


def two_agents(case: Case) -> None:
    """Two torchruns of one rank each, as on two nodes: one agent or rank is killed or frozen, or both are to stop."""
    plan = case.draw_moment(*TRAINING)
    which = case.rng.randrange(2)
    kind = case.rng.choice(["kill rank", "freeze rank", "kill agent", "stop"])
    job = case.start(*_FROZEN, _LONG, is_torchrun=True, num_agents=2)
    case.verdict.where += f" {kind} {which}"
    case.await_moment(job)
    if kind == "stop":
        for agent in (0, 1):
            job.signal_agent(signal.SIGTERM, agent)
    elif kind == "kill agent":
        job.signal_agent(signal.SIGKILL, which)
    else:
        job.signal_rank(which, signal.SIGKILL if kind == "kill rank" else signal.SIGSTOP)
    case.release(job)
    if kind == "freeze rank":
        case.await_any_agent(job)
        for agent, pid in enumerate(job.agent_pids):
            if pid not in job.agent_codes:  # no other node can end a frozen one: the scheduler does
                job.signal_agent(signal.SIGKILL, agent)
    case.finish(job)
    if kind == "freeze rank":
        case.expect_line(job, _naming(which))
    if kind == "stop":
        case.expect_codes(job, 0)
        case.expect_saved(steps_done(plan))
    case.resume(at_least=steps_saved(plan))
