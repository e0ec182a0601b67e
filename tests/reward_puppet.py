"""A reward function that does what the response says, pools that use it, and the processes of a
pool.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Hashable

import psutil

from tlt_megatron.rewards.worker_process import Outcome
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.types import Prompt

# the response says what is to happen
PUPPET = """
import asyncio, ctypes, os, re, signal, subprocess, sys, time

print("loaded")

def act(data_source, solution_str, ground_truth, extra_info=None):
    verb, _, argument = solution_str.partition(" ")
    if verb.startswith("hang") and argument:
        open(argument, "w").close()
    if verb == "score":
        print("this must not reach the pipe")
        return float(argument)
    if verb == "slow":
        time.sleep(float(argument))
        return 1.0
    if verb == "length":
        return len(argument)
    if verb == "pid":
        return os.getpid()
    if verb == "child":
        return subprocess.Popen(["sleep", "1000"]).pid
    if verb == "signal_child":
        child = subprocess.Popen(["sleep", "1000"])
        child.send_signal(int(argument))
        return child.wait()
    if verb == "row":
        return float((data_source, ground_truth, extra_info) == EXPECTED)
    if verb == "raise":
        raise KeyError("the missing thing")
    if verb == "nan":
        return float("nan")
    if verb == "leave":
        sys.exit(3)
    if verb == "die":
        os._exit(3)
    if verb == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if verb == "hang":
        while True:
            pass
    if verb == "hang_in_c":
        re.match("(a*)*b", "a" * 100)  # exponential, and holds the interpreter's lock
    return misbehave(verb, argument)

def misbehave(verb, argument):
    if verb == "print":
        print("from python")
        print("to stderr", file=sys.stderr)
        ctypes.CDLL(None).write(1, b"from C\\n", 7)
        subprocess.run(["echo", "from a child"])
        return 1.0
    if verb == "flood":
        for _ in range(int(argument)):
            os.write(1, b"x" * 1023 + b"\\n")
        return 1.0
    if verb == "write_everywhere":
        return write_to_sockets("garbage", ("", "socket"))
    if verb.startswith("forge"):
        return write_to_sockets(argument or "x" * 3_000_000, ("socket",))
    if verb == "close_range":
        os.closerange(3, 256)
        return 1.0
    if verb.startswith("close_all"):
        os.closerange(0 if verb == "close_all_and_hang" else 3, 100000)
        while verb == "close_all_and_hang":
            time.sleep(1)
        return 1.0
    if verb == "fork":
        os.fork()
        return 1.0
    if verb == "ignore_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if verb == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if verb == "kill_group":
        os.killpg(0, signal.SIGKILL)
    if verb == "fork_and_die":
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(5)
    if verb == "keyboard":
        raise KeyboardInterrupt
    if verb == "long_error":
        raise ValueError("y" * 10_000_000)
    if verb == "strange":
        class Strange:
            def __float__(self): os._exit(6)
        return Strange()
    raise ValueError(verb)

def write_to_sockets(text, kinds):
    for name in os.listdir("/proc/self/fd"):
        try:
            if any(kind in os.path.realpath("/proc/self/fd/" + name) for kind in kinds):
                os.write(int(name), text.encode() + b"\\n")
        except OSError:
            pass
    return 1.0

num_waiting = 0

async def act_async(data_source, solution_str, ground_truth, extra_info=None):
    global num_waiting
    verb, _, argument = solution_str.partition(" ")
    if verb == "meet":
        num_waiting += 1
        while num_waiting < int(argument):
            await asyncio.sleep(0.001)
        return 1.0
    if verb == "hang":
        await asyncio.sleep(1000)
    return act(data_source, solution_str, ground_truth, extra_info)
"""
EXTRA = {
    "text": "ü\ud800",
    "list": [1, 2.5, None, {"deep": True}],
    "day": datetime.date(2025, 1, 2),
    "blob": b"\0",
    3: 4,
}
SEEN = {
    "text": "ü\ud800",
    "list": [1, 2.5, None, {"deep": True}],
    "day": "2025-01-02",
    "blob": "AA==",
    "3": 4,
}
EXPECTED = f"EXPECTED = ('source', 'truth', {SEEN!r})\n"

SHORT_S = 1.5  # what hangs is given so long; a machine that is busy scores in less
PoolMaker = Callable[..., RewardPool]


def prompt(prompt_id: str = "p", **facts: object) -> Prompt:
    return Prompt(prompt_id=prompt_id, draw_index=0, token_ids=(1,), **facts)


def outcomes(pool: RewardPool, *responses: str) -> list[Outcome]:
    for index, response in enumerate(responses):
        pool.submit(index, prompt(f"p{index}"), response)
    found = pool.collect()
    assert found is not None
    return [found[index] for index in range(len(responses))]


def score(pool: RewardPool, *responses: str) -> list[float]:
    return [outcome.score for outcome in outcomes(pool, *responses)]


def scores(pool: RewardPool) -> dict[Hashable, float]:
    """The reward of each response, as `collect` returns it."""
    return {key: outcome.score for key, outcome in (pool.collect() or {}).items()}


def is_running(pid: int) -> bool:
    """Whether a process lives; one that waits for its parent to take note of its end does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)
