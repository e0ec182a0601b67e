"""A reward function that does what the response says, pools that use it, and the processes of a pool."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Hashable
from pathlib import Path

from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.types import Prompt

# the response says what is to happen
PUPPET = """
import asyncio, os, re, signal, subprocess, sys, time

def act(data_source, solution_str, ground_truth, extra_info=None):
    verb, _, argument = solution_str.partition(" ")
    if verb.startswith("hang") and argument:
        open(argument, "w").close()
    if verb == "score":
        print("this must not reach the pipe")
        return float(argument)
    if verb == "dict":
        return {"score": float(argument), "extra": "ignored"}
    if verb == "slow":
        time.sleep(float(argument))
        return 1.0
    if verb == "length":
        return len(argument)
    if verb == "pid":
        return os.getpid()
    if verb == "child":
        return subprocess.Popen(["sleep", "1000"]).pid
    if verb == "has_torch":
        return "torch" in sys.modules
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
    raise ValueError(solution_str)

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


def score(pool: RewardPool, *responses: str) -> list[float]:
    for index, response in enumerate(responses):
        pool.submit(index, prompt(f"p{index}"), response)
    rewards = scores(pool)
    return [rewards[index] for index in range(len(responses))]


def scores(pool: RewardPool) -> dict[Hashable, float]:
    """The reward of each response, as `collect` returns it."""
    return {key: outcome.score for key, outcome in pool.collect().items()}


def is_running(pid: int) -> bool:
    """Whether a process lives; one that waits for its parent to take note of its end does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children_of(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in children for child in file.read_text().split()}


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)
