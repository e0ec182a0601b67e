"""A reward function that fails once, in every way that a user's code can, and reward workers that are killed or frozen."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from tests.faults.case import Case
from tests.faults.processes import descendants
from tests.tiny_task import answers

_FUNCTION = '''"""The reward of the tiny task; one call of the run, the {call}th, also does something bad."""

import os, signal, subprocess, sys, time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if is_the_one():
        misbehave()
    digits = [c for c in solution_str if c.isdigit()]
    return round(4 * sum(c < ground_truth for c in digits) / max(1, len(digits))) / 4


def is_the_one():
    for number in range(1, {call} + 1):
        try:
            os.close(os.open({marks!r} + str(number), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return number == {call}
    return False


def misbehave():
    {body}
'''
_FATAL = {  # no score comes of these
    "raise": "raise KeyError('no such answer')",
    "hang": "time.sleep(1e6)",
    "hang in C": "import ctypes; ctypes.PyDLL(None).sleep(1000000)",
    "exit": "os._exit(3)",
    "sys.exit": "sys.exit(0)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "no memory": "raise MemoryError",
    "not a number": "raise ValueError(float('nan'))",
}
_HARMLESS = {  # the score comes all the same
    "output flood": "[sys.stdout.write('x' * 100_000 + '\\n') for _ in range(100)]; "
    "os.write(1, b'y' * 1_000_000); os.write(2, b'z' * 1_000_000)",
    "closed stdout": "os.close(1); os.close(0)",
    "own session": "subprocess.Popen(['sleep', '300'], start_new_session=True)",
    "own child": "subprocess.Popen(['sleep', '300'])",
    "changed folder": "os.chdir('/')",
    "blocked signals": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])",
}


def _install(case: Case, body: str) -> str:
    """The override that makes the run use a reward which does `body` once."""
    path = case.folder / "reward.py"
    call = case.rng.randint(1, 12)
    marks = str(case.folder / "call.")
    path.write_text(_FUNCTION.format(call=call, marks=marks, body=body))
    case.verdict.where = f"{case.variant.name} call {call}"
    return f"reward.function={path}:compute_score"


def reward_raises(case: Case) -> None:
    """on_error=raise: the run ends, its line names the prompt; with the function repaired it resumes."""
    case.draw_variant()
    kind = case.rng.choice(sorted(_FATAL))
    function = _install(case, _FATAL[kind])
    where = f"{case.verdict.where} {kind}"
    job = case.start(function, "reward.timeout_s=3", "run.group_timeout_s=60")
    case.verdict.where = where
    case.finish(job)
    if all(code == 0 for code in job.rank_codes.values()):
        case.verdict.unclear.append("the run ended well")
    case.expect_line(job, "reward", "prompt_id")
    case.resume()


def reward_zero(case: Case) -> None:
    """on_error=zero: the run goes on, the one response scores 0; nothing else of its step changes."""
    case.draw_variant()
    kind = case.rng.choice(sorted(_FATAL))
    function = _install(case, _FATAL[kind])
    where = f"{case.verdict.where} {kind}"
    job = case.start(function, "reward.timeout_s=3", "reward.on_error=zero")
    case.verdict.where = where
    case.finish(job)
    case.expect_codes(job, 0)
    first = [a[:3] for a in answers(case.run_dir)][: len(answers(case.run_dir)) // 4]
    straight = [a[:3] for a in answers(case.variant.straight)][: len(first)]
    if not first or first != straight:
        case.verdict.lost.append("the tokens of the first step changed")


def reward_harmless(case: Case) -> None:
    """Output, descriptors, sessions and children of a reward function hurt nothing."""
    case.draw_variant()
    kind = case.rng.choice(sorted(_HARMLESS))
    function = _install(case, _HARMLESS[kind])
    where = f"{case.verdict.where} {kind}"
    job = case.start(function)
    case.verdict.where = where
    case.finish(job)
    case.expect_codes(job, 0)
    case.expect_straight()
    if len(job.terminal) > 200_000:
        case.verdict.unclear.append("the terminal got all that the reward wrote")


def reward_worker(case: Case) -> None:
    """SIGKILL, or SIGSTOP for a moment, to a reward worker: it is replaced or goes on, or the run says so and resumes."""
    case.draw_variant()
    case.draw_moment("rollout", "spot", "update")
    number = case.rng.choice([signal.SIGKILL, signal.SIGSTOP])
    job = case.start()
    case.await_moment(job)
    workers = [pid for pid, command in descendants().items() if "tlt_megatron.rewards" in command]
    victim = case.rng.choice(sorted(workers))
    case.verdict.where += f" {number.name} to one of {len(workers)} workers"
    _signal(victim, number)
    case.release(job)
    if number == signal.SIGSTOP:
        time.sleep(case.rng.uniform(0.1, 0.5))
        _signal(victim, signal.SIGCONT)
    case.finish(job)
    if set(job.rank_codes.values()) == {0}:
        case.expect_straight()
        return
    case.expect_line(job, "reward")
    case.resume()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
