"""A reward function or an environment that fails once, in every way that a user's code can; workers
that are killed or frozen.
"""

from __future__ import annotations

import json
import signal
import time

from tests.faults.case import Case
from tests.faults.lab import MANY, NUM_STEPS
from tests.faults.processes import Job, descendants, kill_all
from tests.tiny_task import ENVIRONMENT, REWARD, answers

_FUNCTION = """
well = {name}


def {name}(*args, **kwargs):
    if is_the_one():
        {body}
    return well(*args, **kwargs)
"""
_CLASS = """
class {name}({name}):
    def step(self, turn):
        if is_the_one():
            {body}
        return super().step(turn)
"""
_PATIENT_CLASS = _CLASS.replace("def step", "async def step").replace("super", "await super")
_MISBEHAVIOUR = """

import os, signal, subprocess, sys, time

{tail}


def is_the_one():
    for number in range(1, {call} + 1):
        try:
            os.close(os.open({marks!r} + str(number), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return number == {call}
    return False
"""
_FATAL = {  # no score comes of these
    "raise": "raise KeyError('no such answer')",
    "hang": "time.sleep(1e6)",
    "hang in C": "import ctypes; ctypes.PyDLL(None).sleep(1000000)",
    "exit": "os._exit(3)",
    "sys.exit": "sys.exit(0)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "no memory": "raise MemoryError",
    "not a number": "return float('nan')",
}
_HARMLESS = {  # the score comes all the same
    "output flood": "[sys.stdout.write('x' * 100_000 + '\\n') for _ in range(100)]; "
    "os.write(1, b'y' * 1_000_000); os.write(2, b'z' * 1_000_000)",
    "closed stdout": "os.close(1); os.close(0)",
    "own child": "subprocess.Popen(['sleep', '300'])",
    "changed folder": "os.chdir('/')",
    "blocked signals": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])",
}


def _start(case: Case, bodies: dict[str, str], *overrides: str) -> Job:
    """Start a run whose reward function, or environment, misbehaves once."""
    environment = case.variant.environment
    is_class = environment in ("Search", "Patient")
    is_environment = bool(environment) and case.rng.random() < 0.5
    name, code, form = "compute_score", REWARD, _FUNCTION
    if is_environment:
        name, code = environment, ENVIRONMENT
    if is_environment and is_class:
        form = _CLASS if environment == "Search" else _PATIENT_CLASS
        # another worker repeats the conversation
        lost = {kind: _FATAL[kind] for kind in ("exit", "kill")}
        bodies = {k: v for k, v in bodies.items() if k not in lost}
        bodies |= lost if bodies.keys() <= _HARMLESS.keys() else {}
    if environment == "Patient":  # whether a lost worker had several calls is up to chance
        sure = bodies.keys() - {"hang", "hang in C", *(() if is_environment else ("exit", "kill"))}
        bodies = {kind: bodies[kind] for kind in sure}
    kind = case.rng.choice(sorted(bodies))
    call = case.rng.randint(1, 8 if is_environment else 12)
    _write(case, code, form, name, bodies[kind], call)
    case.verdict.where = f"{case.variant.name} call {call} of {name}: {kind}"
    path = case.folder / "own.py"
    setting = f"rollout.environment={path}:{name}"
    if not is_environment:
        setting = f"reward.function={path}:{name}"
        if is_class:
            setting = f'reward.function={{"environment":1.0,"{path}:{name}":0.5}}'
    return case.start(setting, "reward.timeout_s=3", *overrides)


def _write(case: Case, code: str, form: str, name: str, body: str, call: int) -> None:
    """Write own.py: `code`, whose function or class `name` runs `body` in its call `call`."""
    marks = str(case.folder / "call.")
    tail = form.format(name=name, body=body)
    text = _MISBEHAVIOUR.format(tail=tail, call=call, marks=marks)
    (case.folder / "own.py").write_text(code + text)
    case.mark = case.folder / f"call.{call}"


def reward_raises(case: Case) -> None:
    """on_error=raise: the run ends, its line names the prompt; with the function repaired it
    resumes.
    """
    job = _start(case, _FATAL)
    case.end(job, 1, ranks=[1], line=["^pretrain_rl: ", "reward|environment", "prompt_id"])
    case.resume()


def reward_zero(case: Case) -> None:
    """on_error=zero: the run goes on, the one response scores 0; no token of its step changes."""
    job = _start(case, _FATAL, "reward.on_error=zero")
    case.end(job, 0, ranks=[0], is_quiet=False)  # the run logs the function's own traceback
    if case.variant.environment or case.variant.name.startswith(
        ("dynamic", "partial", "mixture", "tools")
    ):
        return  # the score, or the answer, decides which responses are in the batch
    first = [a[:3] for a in answers(case.run_dir)][: len(answers(case.run_dir)) // NUM_STEPS]
    straight = [a[:3] for a in answers(case.variant.straight)][: len(first)]
    if not first or first != straight:
        case.verdict.lost.append("the tokens of the first step changed")


def reward_harmless(case: Case) -> None:
    """Output, descriptors, sessions and children of a reward function hurt nothing."""
    job = _start(case, _HARMLESS)
    case.end(job, 0, ranks=[0])
    case.expect_straight()
    if len(job.terminal) > 200_000:
        case.verdict.unclear.append("the terminal got all that the reward wrote")


def reward_worker(case: Case) -> None:
    """SIGKILL, or SIGSTOP for a moment, to a reward worker: it is replaced or goes on, or the run
    says so and resumes.
    """
    moment = case.draw_moment("rollout", "spot", "update")
    number = case.rng.choice([signal.SIGKILL, signal.SIGSTOP])
    job = case.start()
    case.await_moment(job)
    workers = [pid for pid, line in descendants().items() if "tlt_megatron.rewards" in line]
    victim = case.rng.choice(sorted(workers))
    case.verdict.where += f" {number.name} to one of {len(workers)} workers"
    kill_all([victim], number)
    case.release(job)
    if number == signal.SIGSTOP:
        time.sleep(case.rng.uniform(0.1, 0.5))
        kill_all([victim], signal.SIGCONT)
    case.end(job, num_reasons=1)
    if job.is_success:
        case.expect_straight()
        return
    case.expect_line(job, "^pretrain_rl: ", "reward")
    case.resume(at_least=moment.saved)


def worker_in_conversations(case: Case) -> None:
    """The only worker of a rank ends by SIGKILL in one of its 64 conversations: another worker
    repeats them.
    """
    case.variant = case.lab.variants[MANY]
    call = case.rng.randint(20, 300)
    case.verdict.where = f"{MANY}, call {call}"
    _write(case, ENVIRONMENT, _PATIENT_CLASS, "Patient", _FATAL["kill"], call)
    job = case.start(f"rollout.environment={case.folder / 'own.py'}:Patient")
    case.end(job, 0, ranks=[0])
    case.expect_straight()
    rows = [json.loads(row) for row in (case.run_dir / "metrics.jsonl").read_text().splitlines()]
    num_repeated = sum(row.get("rollout/repeated_conversations", 0) for row in rows)
    case.verdict.where += f", {num_repeated:.0f} repeated"
    if num_repeated < 2:
        case.verdict.lost.append("the worker had no conversations")
