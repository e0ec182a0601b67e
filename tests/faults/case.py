"""One schedule: a run, one fault in it, what became of it, the resumed run, and the verdict over all that."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import resource
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tests.faults.compare import differences, saved_step
from tests.faults.lab import Lab, Variant
from tests.faults.probe import Plan
from tests.faults.processes import (
    Job,
    adopt_orphans,
    descendants,
    kill_all,
    start_forked,
    start_torchrun,
)

RUN_LIMIT_S = 300.0  # of a run, which takes seconds, on a loaded machine
ORPHAN_GRACE_S = 60.0  # for a reward worker that takes its time
_OWN_PREFIX = re.compile(
    r"^\S*\s*rank \d+ [A-Z]+ "
)  # of a log line: whose it is, not whom it names


class Hang(Exception):
    """The run has not ended in time."""


class Missed(Exception):
    """The fault came too late to be one: the schedule says nothing."""


@dataclass(kw_only=True)
class Verdict:
    """What a schedule has shown; empty lists and no hang: all that is promised held."""

    fault: str
    seed: int
    door: str  # forked | torchrun | model
    where: str = ""  # variant and moment
    hang: str = ""
    lost: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)  # exit codes and messages
    missed: str = ""
    broken: str = ""  # the harness itself failed
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether all promises held, or nothing was shown."""
        return not (self.hang or self.lost or self.orphans or self.unclear or self.broken)


class Case:
    """What a fault function works with. `folder` is the schedule's own; the run folder is in it."""

    def __init__(self, fault: str, seed: int, lab: Lab, folder: Path) -> None:
        self.rng = random.Random(f"{fault}/{seed}")
        self.lab = lab
        self.folder = folder
        self.run_dir = folder / "run"
        self.verdict = Verdict(fault=fault, seed=seed, door="forked")
        self.variant = lab.variant("plain")
        self.plan: Plan | None = None
        self.jobs: list[Job] = []
        self.shutdown_timeout_s = 30.0

    # ---- drawing

    def draw_variant(self, *names: str) -> Variant:
        """One of the variants, or any."""
        self.variant = self.lab.variant(self.rng.choice(names or tuple(self.lab.variants)))
        return self.variant

    def draw_moment(self, *phases: str, action: str = "wait", **changes: object) -> Plan:
        """A moment in one of `phases` on one of the ranks."""
        phase = self.rng.choice(phases)
        if phase == "spot":
            self.draw_variant("spot")
        if phase == "evaluation" and self.variant.name != "plain":
            self.draw_variant("plain")
        rank = self.rng.randrange(2)
        last = self.variant.num_steps
        step = {
            "start": 1,
            "setup": 1,
            "evaluation": self.rng.choice([0, 2]),
            "checkpoint": self.rng.randint(1, last),
            "finish": last,
        }.get(phase, self.rng.randint(1, last))
        held = 1 - rank if phase == "spot" else -1
        plan = Plan(rank=rank, phase=phase, step=step, action=action, held_rank=held)
        self.plan = dataclasses.replace(plan, **changes)  # type: ignore[arg-type]
        return self.plan

    # ---- the run

    def start(self, *overrides: str, is_torchrun: bool = False, num_agents: int = 1) -> Job:
        """Start the run of this schedule, watched."""
        folder = self.folder / f"job{len(self.jobs)}"
        arguments = [*self.variant.arguments(self.run_dir), *overrides]
        self.verdict.where = f"{self.variant.name} {self.plan}"
        if is_torchrun:
            self.verdict.door = "torchrun"
            job = start_torchrun(folder, arguments, self.plan, num_agents=num_agents)
        else:
            job = start_forked(
                folder, arguments, self.plan, shutdown_timeout_s=self.shutdown_timeout_s
            )
        self.jobs.append(job)
        return job

    def await_moment(self, job: Job) -> None:
        """Return when the rank has reached the moment; it waits there until `release`."""
        deadline = time.monotonic() + RUN_LIMIT_S
        while not (job.folder / "reached").exists():
            if job.has_ended:
                raise Missed(f"the run ended before {self.plan}: {job.terminal[-1500:]}")
            if time.monotonic() > deadline:
                self.give_up(job, f"{self.plan} was not reached")
            time.sleep(0.002)

    def release(self, job: Job, inside_s: float = 0.0) -> None:
        """Let the rank go on, for `inside_s`."""
        (job.folder / "go").touch()
        time.sleep(inside_s)

    def strike(self, job: Job, *blows: tuple[int | None, int]) -> None:
        """Signals (rank or None for the agent, number), at the moment or a little inside it."""
        self.await_moment(job)
        is_inside = self.rng.random() < 0.5
        if is_inside:
            self.release(job, self.rng.uniform(0.0, 0.03))
        for rank, number in blows:
            if rank is None:
                if not job.has_ended:
                    job.signal_agent(number)
            else:
                job.signal_rank(rank, number)
        if not is_inside:
            self.release(job)

    def finish(
        self, job: Job, limit_s: float = RUN_LIMIT_S, orphan_grace_s: float = ORPHAN_GRACE_S
    ) -> None:
        """Wait for the end of the run and of all its processes."""
        if not job.wait(limit_s):
            self.give_up(job, f"not ended {limit_s:g} s after the fault")
        deadline = time.monotonic() + orphan_grace_s
        while left := descendants():
            if time.monotonic() > deadline:
                self.verdict.orphans += [f"{pid}: {command}" for pid, command in left.items()]
                kill_all(left)
                return
            time.sleep(0.02)

    def await_any_agent(self, job: Job) -> None:
        """Return when one of several agents has ended."""
        deadline = time.monotonic() + RUN_LIMIT_S
        while not job.has_ended and not job.agent_codes:
            if time.monotonic() > deadline:
                self.give_up(job, "no agent ended")
            time.sleep(0.05)

    def give_up(self, job: Job, why: str) -> NoReturn:
        """A hang: end everything, keep the stacks of the ranks."""
        for rank in job.rank_pids:
            job.signal_rank(rank, signal.SIGCONT)
            job.signal_rank(rank, signal.SIGUSR2)
        time.sleep(1.0)
        stacks = [path.read_text()[-3000:] for path in sorted(job.folder.glob("stack.*"))]
        while left := descendants():
            kill_all(left)
            time.sleep(0.05)
        raise Hang("\n".join([why, job.terminal[-2000:], *stacks]))

    # ---- what was promised

    def expect_codes(self, job: Job, *allowed: int, ranks: Sequence[int] = (0, 1)) -> None:
        """Exit codes of the ranks, or of the agents of torchrun."""
        codes = (
            job.agent_codes
            if job.is_torchrun
            else {rank: job.rank_codes.get(rank) for rank in ranks}
        )
        wrong = {who: code for who, code in codes.items() if code not in allowed}
        if wrong:
            self.unclear(job, f"exit codes {wrong}: must be one of {allowed}")

    def expect_refused(self, job: Job) -> None:
        """A rank ends with exit code 2; others may be ended by the agent for that. No traceback."""
        codes = set(job.rank_codes.values())
        by_agent = {-signal.SIGTERM, 128 + signal.SIGTERM}
        if 2 not in codes or codes - by_agent - {2}:
            self.unclear(job, f"exit codes {job.rank_codes}: must be 2")
        self.expect_no_traceback(job)

    def expect_line(self, job: Job, *patterns: str) -> None:
        """One line of the terminal that holds all of `patterns`."""
        lines = (_OWN_PREFIX.sub("", line) for line in job.terminal.splitlines())
        if not any(all(re.search(p, line, re.I) for p in patterns) for line in lines):
            self.unclear(job, f"no line with {patterns}")

    def expect_no_traceback(self, job: Job) -> None:
        """A stop on request and a refusal are no errors."""
        if "Traceback (most recent call last)" in job.terminal:
            self.unclear(job, "a traceback on the terminal")

    def unclear(self, job: Job, what: str) -> None:
        """A wrong exit code or message."""
        self.verdict.unclear.append(f"{what}; the terminal ends: {job.terminal[-2500:]}")

    def expect_saved(self, at_least: int) -> None:
        """No work is lost but for the step that was under way."""
        saved = saved_step(self.run_dir)
        if saved < at_least:
            self.verdict.lost.append(f"saved step {saved}, {at_least} were done")

    def expect_straight(self, up_to: int | None = None) -> None:
        """The run folder is what a run without a fault leaves, in the steps `up_to` at least."""
        self.verdict.lost += differences(self.run_dir, self.variant.straight, up_to)

    def resume(self, *overrides: str, at_least: int = 0) -> Job:
        """Resume where the run has stopped, to its end; it must be the straight run then."""
        folder = self.folder / f"job{len(self.jobs)}"
        saved = saved_step(self.run_dir)
        is_beyond = saved > self.variant.num_steps  # a fault that was to hit a longer run
        if is_beyond:
            overrides = (*overrides, f"run.num_steps={saved}")
        arguments = [*self.variant.arguments(self.run_dir), "--resume", "auto", *overrides]
        job = start_forked(folder, arguments)
        self.jobs.append(job)
        self.finish(job)
        if any(job.rank_codes.get(rank) != 0 for rank in (0, 1)):
            self.verdict.lost.append(f"the resumed run failed: {job.terminal[-3000:]}")
            return job
        self.expect_straight(up_to=self.variant.num_steps if is_beyond else None)
        start = re.search(r"restored \S*iter_0*(\d+)", job.terminal)
        begun = int(start[1]) if start else 0
        if begun < at_least:
            self.verdict.lost.append(f"resumed from step {begun}, {at_least} was saved")
        return job


def judge(run: Callable[[Case], None], case: Case) -> Verdict:
    """Run one schedule in this process, which adopts what it leaves behind and has no other children."""
    adopt_orphans()
    started = time.monotonic()
    try:
        run(case)
    except Hang as hang:
        case.verdict.hang = str(hang)
    except Missed as missed:
        case.verdict.missed = str(missed)
    except Exception:  # of the harness: the table has a column for it
        case.verdict.broken = traceback.format_exc()
    while left := descendants():
        kill_all(left)
        time.sleep(0.02)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    case.verdict.cpu_seconds = usage.ru_utime + usage.ru_stime
    case.verdict.seconds = time.monotonic() - started
    return case.verdict
