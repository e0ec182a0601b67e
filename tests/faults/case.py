"""One schedule: a run, one fault in it, what became of it, the resumed run.

The oracle is here: `end`, `resume`, `compare`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from tests.faults.lab import LAYOUTS, NUM_STEPS, RUN_LIMIT_S, Lab
from tests.faults.probe import Moment
from tests.faults.processes import Job, adopt_orphans, descendants, kill_all, start
from tests.tiny_task import answers
from tlt_megatron.config.own_layer import stored_layers
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.trainer.saving.manifest import read_pointer

SLACK_S = 30.0  # on top of what is promised, for a loaded machine
LONG = "run.num_steps=40"  # has not ended when the fault comes, however late that is
# Metrics that are the same at any layout, and those that are the same to rounding at another one.
_EXACT = (
    "critic/rewards/mean critic/rewards/max response_length/mean rollout/num_tokens eval/accuracy"
)
_ROUNDED = "actor/pg_loss actor/entropy actor/grad_norm critic/vf_loss"
_OWN_PREFIX = re.compile(r"^\S*\s*rank \d+ [A-Z]+ ")  # begins a log line: the rank that writes it
COLUMNS = ("hang", "lost", "orphans", "unclear", "broken", "missed")  # fields of a verdict


class Hang(Exception):
    """The run has not ended in time."""


class Missed(Exception):
    """The fault has not happened, so the schedule shows nothing."""


@dataclass(kw_only=True)
class Verdict:
    """What a schedule has shown."""

    fault: str
    seed: int
    where: str = ""  # variant, moment and details
    hang: str = ""
    lost: list[str] = field(default_factory=list)  # steps, tokens, weights, checkpoints
    orphans: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)  # exit codes, messages, survivors too late
    broken: str = ""  # the harness itself failed
    missed: str = ""  # the fault has not happened
    ended_s: float = 0.0  # from the fault to the end of the last survivor
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the fault happened and all promises held."""
        return not any(getattr(self, name) for name in COLUMNS)


class Case:
    """What a fault function works with. `folder` is the schedule's own; the run folder is in it."""

    def __init__(self, fault: str, seed: int, lab: Lab, folder: Path) -> None:
        self.rng = random.Random(f"{fault}/{seed}")
        self.lab = lab
        self.folder = folder
        self.run_dir = folder / "run"
        self.verdict = Verdict(fault=fault, seed=seed)
        self.variant = lab.variants[self.rng.choice(list(lab.variants))]
        self.moment: Moment | None = None
        self.jobs: list[Job] = []
        self.limit_s = RUN_LIMIT_S
        self.struck_at = 0.0  # wall time
        self.mark: Path | None = None  # exists once the fault has happened

    def draw_moment(
        self, *phases: str, variants: Sequence[str] = (), resumed: int = -1, **changes: object
    ) -> Moment:
        """A moment in one of `phases` on one of the ranks; in a third of the schedules of a run
        that is resumed.
        """
        phase = self.rng.choice(phases)
        fitting = {"spot": ["spot"], "evaluation": ["plain"]}
        name = self.rng.choice(fitting.get(phase, variants or list(self.lab.variants)))
        self.variant = self.lab.variants[name]
        resumed = resumed if resumed >= 0 else self.rng.choice([0, 0, 0, 0, 1, 2])
        if resumed:
            self.variant.copy_stopped(self.run_dir, resumed)
        fixed = {"start": 1, "setup": 1, "finish": NUM_STEPS}
        fixed["evaluation"] = NUM_STEPS if resumed else self.rng.choice([0, 2, NUM_STEPS])
        rank, step = self.rng.randrange(2), self.rng.randint(resumed + 1, NUM_STEPS)
        moment = Moment(
            rank=rank,
            phase=phase,
            step=fixed.get(phase, step),
            resumed_step=resumed,
            held_rank=1 - rank if phase == "spot" else -1,
        )
        self.moment = replace(moment, **changes)  # type: ignore[arg-type]
        return self.moment

    # ---- the run

    def start(self, *overrides: str, **options: int) -> Job:
        """Start the run of this schedule, watched."""
        self.verdict.where = self.verdict.where or f"{self.variant.name} {self.moment}"
        is_resumed = self.moment is not None and self.moment.resumed_step > 0
        resume = ["--resume", "auto"] if is_resumed else []
        arguments = [*self.variant.arguments(self.run_dir), *resume, *overrides]
        return self._start(arguments, **options)

    def _start(self, arguments: list[str], **options: int) -> Job:
        folder = self.folder / f"job{len(self.jobs)}"
        self.jobs.append(start(folder, arguments, self.moment, **options))
        return self.jobs[-1]

    def await_moment(self, job: Job) -> None:
        """Return when the rank has reached the moment; it waits there until `release`."""
        deadline = time.monotonic() + RUN_LIMIT_S
        while not (job.folder / "reached").exists():
            if job.has_ended:
                raise Missed(f"the run ended before {self.moment}: {job.terminal[-1500:]}")
            if time.monotonic() > deadline:
                self.give_up(job, f"{self.moment} was not reached")
            time.sleep(0.002)

    def release(self, job: Job, inside_s: float = 0.0) -> None:
        """Let the rank go on, for `inside_s`."""
        (job.folder / "go").touch()
        time.sleep(inside_s)

    def strike(self, job: Job, number: int, *targets: int | None) -> None:
        """Send a signal to ranks, or to the launcher (None), at the moment or a little later."""
        self.await_moment(job)
        is_last = self.moment is not None and self.moment.phase == "finish"
        is_inside = not is_last and self.rng.random() < 0.5
        if is_inside:
            self.release(job, self.rng.uniform(0.0, 0.03))
        self.struck_at = time.time()
        job.signal(number, *targets)
        if not is_inside:
            self.release(job)

    def give_up(self, job: Job, why: str) -> NoReturn:
        """End the schedule as a hang, with the stacks of the ranks."""
        job.signal(signal.SIGCONT, *job.rank_pids)
        job.signal(signal.SIGUSR2, *job.rank_pids)
        time.sleep(1.0)
        stacks = [path.read_text()[-3000:] for path in sorted(job.folder.glob("stack.*"))]
        raise Hang("\n".join([why, job.terminal[-2000:], *stacks]))

    # ---- the oracle

    def end(
        self,
        job: Job,
        *codes: int,
        ranks: Collection[int] = (),
        line: Sequence[str] = (),
        within_s: float = RUN_LIMIT_S,
        victims: Collection[int] = (),
        num_reasons: int = 0,
        is_quiet: bool = True,
        orphan_grace_s: float = 60.0,  # for a reward worker that takes its time
    ) -> None:
        """Wait for the end of a run and of all its processes, and judge it.

        codes: which exit codes the launchers may have; ranks: which the surviving ranks may have;
        line: patterns that one line of the terminal holds; within_s: seconds in which the survivors
        end. A run says at most once on each node (`num_reasons` times) why it ends, and shows no
        traceback (`is_quiet`).
        """
        if not job.wait(self.limit_s):
            self.give_up(job, f"not ended {self.limit_s:g} s after the fault")
        deadline = time.monotonic() + orphan_grace_s
        while (left := descendants()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.verdict.orphans += [f"{pid}: {command}" for pid, command in left.items()]
        kill_all(left)
        if self.moment is not None and not self.mark:
            self.mark = job.folder / "reached"
        if self.mark and not self.mark.exists():
            raise Missed(f"the run ended before {self.moment or self.mark}")
        if codes and not set(job.codes.values()) <= set(codes):
            self.unclear(job, f"exit codes {list(job.codes.values())}: must be in {codes}")
        ends = {rank: end for rank, end in job.rank_ends.items() if rank not in victims}
        wrong = {rank: code for rank, (code, _) in ends.items() if ranks and code not in ranks}
        if wrong:
            self.unclear(job, f"exit codes of ranks {wrong}: must be in {ranks}")
        if self.mark and ends:
            struck_at = self.struck_at or self.mark.stat().st_mtime
            self.verdict.ended_s = max(when for _, when in ends.values()) - struck_at
            if self.verdict.ended_s > within_s + SLACK_S:
                self.unclear(job, f"ended after {self.verdict.ended_s:.1f} s, promised {within_s}")
        if line:
            self.expect_line(job, *line)
        reasons = re.findall("^pretrain_rl: ", job.terminal, re.M)
        if len(reasons) > (num_reasons or len(job.launchers)):
            self.unclear(job, f"{len(reasons)} lines say why the run ends")
        if is_quiet and re.search(r"^Traceback \(most|^frame #0", job.terminal, re.M):
            self.unclear(job, "a traceback on the terminal")

    def expect_line(self, job: Job, *patterns: str) -> None:
        """One line of the terminal that holds all of `patterns`."""
        lines = (_OWN_PREFIX.sub("", line) for line in job.terminal.splitlines())
        if not any(all(re.search(p, line, re.I) for p in patterns) for line in lines):
            self.unclear(job, f"no line with {patterns}")

    def unclear(self, job: Job, what: str) -> None:
        """Note a wrong exit code or message, or a late end."""
        self.verdict.unclear.append(f"{what}; the terminal ends: {job.terminal[-2500:]}")

    def expect_saved(self, at_least: int) -> int:
        """No work is lost but for the step in which the run stopped; returns the step that is
        saved.
        """
        saved = read_pointer(self.run_dir / "checkpoints") or 0
        if saved < at_least:
            self.verdict.lost.append(f"saved step {saved}, {at_least} were done")
        return saved

    def expect_straight(self, **options: bool) -> None:
        """The run folder is what a run without a fault leaves."""
        self.verdict.lost += compare(self.run_dir, self.variant.straight, **options)

    def resume(self, *, at_least: int = 0) -> Job:
        """Resume where the run has stopped, to its end, in half of the schedules at another layout:
        it must be the straight run.
        """
        saved = read_pointer(self.run_dir / "checkpoints") or 0
        last = max(NUM_STEPS, saved)  # a fault that was to hit a longer run
        others = [name for name in LAYOUTS if name != self.variant.layout]
        layout = self.rng.choice([self.variant.layout] * len(others) + others)
        overrides, num_ranks = self.variant.at(layout)
        self.moment, self.mark, self.struck_at = None, None, 0.0
        self.verdict.where += f", resumed at {layout}"
        arguments = [*self.variant.arguments(self.run_dir), "--resume", "auto", *overrides]
        arguments.append(f"run.num_steps={last}")
        job = self._start(arguments, num_ranks=num_ranks)
        self.end(job)
        if not job.is_success:
            self.verdict.lost.append(f"the resumed run failed: {job.terminal[-3000:]}")
            return job
        self.expect_straight(is_beyond=last > NUM_STEPS, is_rounded=layout != self.variant.layout)
        restored = re.search(r"restored \S*iter_0*(\d+)", job.terminal)
        begun = int(restored[1]) if restored else 0
        if begun < at_least:
            self.verdict.lost.append(f"resumed from step {begun}, {at_least} was saved")
        return job


def judge(run: Callable[[Case], None], case: Case) -> Verdict:
    """Run one schedule in this process, which adopts what it leaves behind and has no other
    children.
    """
    adopt_orphans()
    started = time.monotonic()
    try:
        run(case)
    except Hang as hang:
        case.verdict.hang = str(hang)
    except Missed as missed:
        case.verdict.missed = str(missed)
    except Exception:  # an error of the harness: the table has a column for it
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


def compare(
    run_dir: Path,
    straight: Path,
    *,
    is_beyond: bool = False,
    is_rounded: bool = False,
    trains_own_layer: bool = False,
) -> list[str]:
    """What is lost, doubled or other in `run_dir`, in words; empty if it is the straight run.

    is_beyond: it went on after the straight run's last step, so its weights are not compared;
    is_rounded: it was resumed at another layout, where losses and weights are equal to rounding;
    trains_own_layer: idle ranks train the policy's layer for MTP, as much as time allows.
    """
    import torch

    rows, expected = _metrics(run_dir), _metrics(straight)
    keys, others = Counter(key for key, _ in rows), Counter(key for key, _ in expected)
    found = [f"metrics.jsonl has {key} {n} times too often" for key, n in (keys - others).items()]
    found += [f"metrics.jsonl lacks {key} {n} times" for key, n in (others - keys).items()]
    for (key, value), (_, other) in zip(rows, expected, strict=False) if not found else ():
        slack = 1e-4 + 1e-3 * abs(other) if is_rounded and key[1] in _ROUNDED.split() else 0.0
        if not abs(value - other) <= slack:
            found.append(f"{key} is {value}, and {other} in the straight run")
    theirs = answers(straight)
    if answers(run_dir)[: len(theirs) if is_beyond else None] != theirs:
        found.append("tokens or rewards differ from the straight run")
    if is_beyond:
        return found
    if not (run_dir / "hf" / "config.json").is_file():
        return [*found, "no hf/ was exported"]
    mine, straight_ones = (dict(HfReader(each / "hf").items()) for each in (run_dir, straight))
    if mine.keys() != straight_ones.keys():
        return [*found, "other weights"]
    rtol, atol = (1e-3, 1e-4) if is_rounded else (0.0, 0.0)
    trained = stored_layers(load_model_config(straight / "hf"), mine) if trains_own_layer else []
    for name in mine.keys() - {*trained}:
        tensor = mine[name]
        if not torch.allclose(tensor, straight_ones[name], rtol=rtol, atol=atol):
            found.append(f"weights differ: {name}")
    return found


def _metrics(run_dir: Path) -> list[tuple[tuple[int, str], float]]:
    """((step, metric), value) of every row up to the straight run's last step, sorted; as often as
    it is written.
    """
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    names = f"{_EXACT} {_ROUNDED} training/policy_version".split()
    rows = [row for row in rows if row["step"] <= NUM_STEPS]
    return sorted(((row["step"], name), row[name]) for row in rows for name in names if name in row)
