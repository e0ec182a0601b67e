"""What happens to processes: asked to stop, killed, frozen; clocks that jump, stores that are slow
or silent.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tests.faults.case import LONG, SLACK_S, Case
from tests.faults.lab import NUM_STEPS, RUN_LIMIT_S
from tests.faults.processes import kill_all

PHASES = ("setup", "rollout", "spot", "update", "checkpoint", "evaluation", "finish")
TRAINING = PHASES[1:-1]
HEARTBEAT_S = 5
# A collective's timeout far above the heartbeat's: survivors that end in time have heard of the
# loss from the heartbeat.
WATCHED = (
    "run.group_timeout_s=150",
    f"run.heartbeat_timeout_s={HEARTBEAT_S}",
    "reward.timeout_s=10",
)
GRACE_S = 5.0  # docs/reliability.md: for a rank that is in a collective or a long rollout
KILLED = 128 + signal.SIGKILL  # exit code of a launcher
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ENDED = 128 + signal.SIGTERM  # a rank that the launcher ends during set-up


def stop_request(case: Case) -> None:
    """SIGTERM, SIGINT or SIGUSR1 to the launcher, to all ranks or to one: the run saves and ends
    with success.
    """
    moment = case.draw_moment(*PHASES)
    number = case.rng.choice(_STOPS)
    targets = case.rng.choice([(None,), (0, 1), (case.rng.randrange(2),)])
    job = case.start()
    case.verdict.where += f" {number.name} to {targets}"
    case.strike(job, number, *targets)
    if moment.phase == "setup":  # nothing is there to be saved
        codes = [0, *(128 + number for number in _STOPS)]
        case.end(job, *codes, ranks=codes)
        case.resume(at_least=moment.saved)
        return
    case.end(job, 0, ranks=[0])
    done = moment.done + (moment.phase == "update")  # an update that has begun is completed
    if case.expect_saved(done) < NUM_STEPS:
        case.expect_line(job, f"{number.name}: the run stops")
        case.expect_line(job, r"saved step \d of \d; resume with:$")
    case.resume(at_least=done)


def impatient_stop(case: Case) -> None:
    """Ctrl-C twice, to ranks or to the launcher: the second ends the run at once; what was saved
    before is there.
    """
    moment = case.draw_moment(*TRAINING)
    job = case.start()
    targets = case.rng.choice([(None,), (0, 1)])
    case.verdict.where += f" to {targets}"
    case.strike(job, signal.SIGINT, *targets)
    time.sleep(case.rng.uniform(0.0, 0.05))
    job.signal(signal.SIGINT, *targets)
    codes = [0, 128 + signal.SIGINT, _ENDED]  # 0: saved before the second
    case.end(job, *codes, KILLED, ranks=[*codes, -signal.SIGKILL], within_s=GRACE_S)
    case.resume(at_least=moment.saved)


def killed_rank(case: Case) -> None:
    """SIGKILL to one rank: the other ends within seconds with a line that names it; the run
    resumes.
    """
    moment = case.draw_moment(*PHASES)
    victim = case.rng.randrange(2)
    job = case.start(*WATCHED, *([LONG] if moment.phase != "finish" else []))
    case.verdict.where += f" SIGKILL to rank {victim}"
    case.strike(job, signal.SIGKILL, victim)
    promise: dict[str, Any] = {"ranks": [1], "line": naming(victim)}
    if moment.phase in ("setup", "finish"):
        promise = {"ranks": [0, 1, _ENDED]}
    case.end(job, 1, KILLED, _ENDED, within_s=GRACE_S, victims=[victim], **promise)
    case.resume(at_least=moment.saved)


def killed_launcher(case: Case) -> None:
    """SIGKILL to the launcher: its ranks do not train on without it."""
    moment = case.draw_moment(*PHASES)
    job = case.start(LONG)
    case.strike(job, signal.SIGKILL, None)
    case.end(job, -signal.SIGKILL, orphan_grace_s=SLACK_S)
    case.resume(at_least=moment.saved)


def killed_all(case: Case) -> None:
    """SIGKILL to everything at once, as a node that loses power but for its disk."""
    moment = case.draw_moment(*PHASES)
    job = case.start()
    case.strike(job, signal.SIGKILL, 0, 1, None)
    case.end(job)
    case.resume(at_least=moment.saved)


def short_freeze(case: Case) -> None:
    """SIGSTOP, then SIGCONT, to a rank for less than the heartbeat's timeout, or to all for longer:
    nothing changes.
    """
    case.draw_moment(*PHASES)
    victims = case.rng.choice([(0,), (1,), (0, 1)])
    longest_s = HEARTBEAT_S * (1.5 if len(victims) > 1 else 0.5)
    seconds = case.rng.choice([case.rng.uniform(0.1, 1.0), case.rng.uniform(1.0, longest_s)])
    job = case.start(*WATCHED)
    case.verdict.where += f" ranks {victims} frozen {seconds:.1f} s"
    case.strike(job, signal.SIGSTOP, *victims)
    time.sleep(seconds)
    job.signal(signal.SIGCONT, *victims)
    case.end(job, 0, ranks=[0])
    case.expect_straight()


def long_freeze(case: Case) -> None:
    """SIGSTOP for good: the other rank ends within the timeouts, with a line that names the frozen
    one.
    """
    moment = case.draw_moment(*TRAINING)
    victim = case.rng.randrange(2)
    job = case.start(*WATCHED, LONG, shutdown_timeout_s=3)
    case.verdict.where += f" rank {victim} frozen"
    case.strike(job, signal.SIGSTOP, victim)
    within_s = HEARTBEAT_S + GRACE_S
    case.end(job, 1, KILLED, ranks=[1], line=naming(victim), within_s=within_s, victims=[victim])
    case.resume(at_least=moment.saved)


def two_launchers(case: Case) -> None:
    """Two launchers of one rank each, as on two nodes: a launcher or a rank is killed or frozen, or
    both are to stop.
    """
    moment = case.draw_moment(*TRAINING)
    which = case.rng.randrange(2)
    kind = case.rng.choice(["kill rank", "freeze rank", "kill launcher", "stop"])
    job = case.start(*WATCHED, LONG, num_launchers=2)
    case.verdict.where += f" {kind} {which}"
    case.await_moment(job)
    case.struck_at = time.time()
    if kind == "stop":
        kill_all(job.launchers, signal.SIGTERM)
        case.release(job)
        case.end(job, 0, ranks=[0])
        case.expect_saved(moment.done)
        case.resume(at_least=moment.done)
        return
    if kind == "kill launcher":
        kill_all([job.launchers[which]])
    else:
        job.signal(signal.SIGSTOP if kind == "freeze rank" else signal.SIGKILL, which)
    case.release(job)
    if kind == "freeze rank":  # no other node can end a frozen rank: the scheduler does
        if not job.wait(RUN_LIMIT_S, count=1):
            case.give_up(job, "no launcher ended")
        kill_all(set(job.launchers) - job.codes.keys())
    codes, within_s = (1, -signal.SIGKILL, KILLED), HEARTBEAT_S + GRACE_S
    case.end(job, *codes, ranks=[1], line=naming(which), within_s=within_s, victims=[which])
    case.resume(at_least=moment.saved)


def clock_jump(case: Case) -> None:
    """The wall clock of a rank jumps by up to a day, forwards or backwards: the run is the straight
    run.
    """
    seconds = case.rng.choice([-1, 1]) * case.rng.choice([60.0, 3600.0, 86400.0])
    case.draw_moment("setup", *TRAINING, action="clock", amount=seconds)
    job = case.start()
    case.end(job, 0, ranks=[0])
    case.expect_straight()


def slow_store(case: Case) -> None:
    """Every message between a rank and the spot store takes up to 50 ms: the run is the straight
    run.
    """
    delay_s = case.rng.choice([0.005, 0.02, 0.05])
    case.draw_moment("start", variants=["spot", "dynamic"], action="clock", store_delay_s=delay_s)
    job = case.start()
    case.end(job, 0, ranks=[0])
    case.expect_straight()


def silent_store(case: Case) -> None:
    """The job's store answers rank 1 no more: the run ends with a line that says so, or ends well
    if it needs it no more.
    """
    phase = case.rng.choice(["rollout", "spot", "update"])
    silence: dict[str, Any] = {"action": "silence", "store_delay_s": 0.0}
    moment = case.draw_moment(phase, variants=["spot"], **silence, rank=1, held_rank=-1)
    job = case.start(*WATCHED, shutdown_timeout_s=5)
    case.end(job, num_reasons=2)  # the ranks cannot tell each other
    if job.is_success:
        case.expect_straight()
        return
    case.expect_line(job, "^pretrain_rl: ", "rank 0", r"store|\bphase [A-Z]")
    case.resume(at_least=moment.saved)


def naming(rank: int) -> tuple[str, ...]:
    """The patterns of one line: rank, host and phase."""
    return "^pretrain_rl: ", rf"rank {rank}\b", rf"\b{os.uname().nodename}\b", r"\bphase [A-Z]"
