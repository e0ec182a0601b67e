"""A reward function that does what the response says, pools that use it, and whether a process is
gone.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Hashable

import psutil

from tests.ranks import LIMIT_S
from tlt_megatron.rewards.worker_process import Outcome
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.types import Prompt

# `act` runs the response as Python code; its reward is `reward`, else 1.
PUPPET = """
import asyncio, ctypes, os, re, signal, subprocess, sys, time

print("loaded")

def act(data_source, solution_str, ground_truth, extra_info=None):
    print("this must not reach the pipe")
    place = globals() | {"row": (data_source, ground_truth, extra_info)}
    exec(solution_str, place)
    return place.get("reward", 1.0)

def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str)

def write_to_sockets(text, kind="socket"):
    for name in os.listdir("/proc/self/fd"):
        try:
            if kind in os.path.realpath("/proc/self/fd/" + name):
                os.write(int(name), text.encode() + b"\\n")
        except OSError:
            pass

num_waiting = 0

async def meet(data_source, solution_str, ground_truth, extra_info=None):
    global num_waiting
    num_waiting += 1
    while num_waiting < int(solution_str):
        await asyncio.sleep(0.001)
    return 1.0

async def act_async(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        await asyncio.sleep(1000)
    return act(data_source, solution_str, ground_truth, extra_info)
"""
PID = "reward = os.getpid()"
CHILD = "reward = subprocess.Popen(['sleep', '1000']).pid"
DAEMON = "reward = subprocess.Popen(['sleep', '1000'], start_new_session=True).pid"
RAISE = "raise KeyError('the missing thing')"
DIE = "os._exit(3)"
HANG = "while True: pass"
HANG_IN_C = "re.match('(a*)*b', 'a' * 100)"  # exponential, and holds the interpreter's lock
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

SHORT_S = 4.0  # what hangs is given so long; a machine that is busy scores in less
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
    """Whether a process lives. One whose parent has not yet taken note of its end does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)
