from __future__ import annotations

import datetime
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tlt_megatron.rewards.workers import RewardPool, RewardStats
from tlt_megatron.types import Prompt

REPOSITORY = Path(__file__).parents[3]

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

PoolMaker = Callable[..., RewardPool]


def prompt(prompt_id: str = "p", **facts: object) -> Prompt:
    return Prompt(prompt_id=prompt_id, draw_index=0, token_ids=(1,), **facts)


@pytest.fixture
def make_pool(tmp_path: Path):
    """Pools over PUPPET: quick to fail, closed after the test."""
    (tmp_path / "puppet.py").write_text(PUPPET + EXPECTED)
    pools: list[RewardPool] = []

    def make(
        function: str = "act",
        *,
        num_workers: int = 1,
        timeout_s: float = 30.0,
        on_error: str = "zero",
    ) -> RewardPool:
        spec = f"{tmp_path / 'puppet.py'}:{function}"
        pools.append(
            RewardPool(spec, num_workers=num_workers, timeout_s=timeout_s, on_error=on_error)
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def score(pool: RewardPool, *responses: str) -> list[float]:
    for index, response in enumerate(responses):
        pool.submit(index, prompt(f"p{index}"), response)
    rewards = pool.collect()
    return [rewards[index] for index in range(len(responses))]


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
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("function", ["act", "act_async"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_each_key_gets_its_own_reward(
    make_pool: PoolMaker, function: str, num_workers: int
) -> None:
    pool = make_pool(function, num_workers=num_workers)
    pool.wait_ready()
    numbers = random.Random(0).sample(range(1000), 200)
    for batch in (0, 1):  # keys may come again in the next batch
        for number in numbers:
            pool.submit((number, batch), prompt(), f"score {number}")
        assert pool.collect() == {(number, batch): float(number) for number in numbers}
    assert pool.collect() == {}


def test_order_of_submission_does_not_matter(make_pool: PoolMaker) -> None:
    pool = make_pool(num_workers=2)
    jobs = [(i, f"slow {0.002 * (i % 3)}" if i % 2 else f"score {i}") for i in range(30)]
    collected = []
    for order in (jobs, jobs[::-1]):
        for key, response in order:
            pool.submit(key, prompt(), response)
        collected.append(pool.collect())
    assert collected[0] == collected[1]


def test_built_in_math_scores_in_a_worker() -> None:
    with RewardPool("math", num_workers=1, timeout_s=30.0, on_error="raise") as pool:
        pool.submit("right", prompt(ground_truth="1/2"), "\\boxed{\\frac{2}{4}}")
        pool.submit("wrong", prompt(ground_truth="1/2"), "\\boxed{\\frac{3}{4}}")
        assert pool.collect() == {"right": 1.0, "wrong": 0.0}


def test_function_gets_the_whole_row_as_json_carries_it(make_pool: PoolMaker) -> None:
    pool = make_pool()
    row = prompt(data_source="source", ground_truth="truth", extra_info=EXTRA)
    pool.submit(0, row, "row")
    assert pool.collect() == {0: 1.0}


def test_long_responses_pass_whole(make_pool: PoolMaker) -> None:
    pool = make_pool()
    assert score(pool, "score 1", *["length " + "ü" * 300_000] * 40) == [1.0] + [300_000.0] * 40


def test_results_may_be_dicts(make_pool: PoolMaker) -> None:
    assert score(make_pool(), "dict 0.5") == [0.5]


def test_workers_have_no_torch(make_pool: PoolMaker) -> None:
    assert "torch" in sys.modules  # this process has
    assert score(make_pool(), "has_torch") == [0.0]


def test_async_function_scores_many_responses_at_once(make_pool: PoolMaker) -> None:
    assert score(make_pool("act_async"), *["meet 40"] * 40) == [1.0] * 40


@pytest.mark.parametrize("function", ["act", "act_async"])
@pytest.mark.parametrize(
    "response,named",
    [
        ("raise", ["Traceback", "KeyError: 'the missing thing'", "puppet.py"]),
        ("nan", ["score=nan: must be a finite number"]),
        ("leave", ["SystemExit: 3"]),
        ("die", ["the worker process ended with exit status 3"]),
        ("crash", ["the worker process ended with signal SIGSEGV"]),
    ],
)
def test_failures_are_raised_with_prompt_function_and_cause(
    make_pool: PoolMaker, function: str, response: str, named: list[str]
) -> None:
    pool = make_pool(function, on_error="raise")
    with pytest.raises(RuntimeError) as caught:
        score(pool, "score 1", response)
    for text in (f"puppet.py:{function}'", "prompt_id='p1'", "(rollout 1)", *named):
        assert text in str(caught.value)
    with pytest.raises(RuntimeError, match="prompt_id='p1'"):
        pool.collect()


@pytest.mark.parametrize("function,verb", [("act", "hang_in_c"), ("act_async", "hang")])
def test_hanging_function_is_raised_with_the_timeout(
    make_pool: PoolMaker, function: str, verb: str
) -> None:
    pool = make_pool(function, timeout_s=0.3, on_error="raise")
    with pytest.raises(RuntimeError, match=r"prompt_id='p0'[\s\S]*(timeout_s=0\.3|TimeoutError)"):
        score(pool, verb)


@pytest.mark.parametrize("function", ["act", "act_async"])
@pytest.mark.parametrize("response", ["raise", "die", "crash", "leave"])
def test_failures_count_as_zero_and_lose_no_other_work(
    make_pool: PoolMaker, function: str, response: str
) -> None:
    pool = make_pool(function)
    others = [f"score {i}" for i in range(1, 41)]
    rewards = score(pool, *others[:20], response, *others[20:])
    assert rewards == [*range(1, 21), 0.0, *range(21, 41)]
    stats = pool.take_stats()
    assert (stats.num_scored, stats.num_errors, stats.num_timeouts) == (41, 1, 0)


@pytest.mark.parametrize(
    "function,verb", [("act", "hang"), ("act", "hang_in_c"), ("act_async", "hang")]
)
def test_hanging_function_counts_as_zero_and_loses_no_other_work(
    make_pool: PoolMaker, function: str, verb: str
) -> None:
    pool = make_pool(function, timeout_s=0.3)
    others = [f"score {i}" for i in range(1, 41)]
    rewards = score(pool, *others[:20], verb, *others[20:])
    assert rewards == [*range(1, 21), 0.0, *range(21, 41)]
    stats = pool.take_stats()
    assert (stats.num_scored, stats.num_errors, stats.num_timeouts) == (41, 0, 1)


def test_hung_worker_is_replaced_and_gone(make_pool: PoolMaker) -> None:
    pool = make_pool(timeout_s=0.3)
    first, hung, second = score(pool, "pid", "hang", "pid")
    assert hung == 0.0
    assert first != second
    assert not is_running(int(first))


def test_full_pipe_to_a_hung_worker_holds_nothing_up(make_pool: PoolMaker) -> None:
    pool = make_pool(timeout_s=0.5)
    quick, long = ["score 1"] * 50, ["length " + "x" * 300_000] * 4
    assert score(pool, *quick, "hang_in_c", *long) == [1.0] * 50 + [0.0] + [300_000.0] * 4


def test_time_spent_in_a_workers_queue_is_not_counted(make_pool: PoolMaker) -> None:
    pool = make_pool(timeout_s=0.6)
    quick, slow = ["score 1"] * 50, ["slow 0.1"] * 8  # quick ones make the worker's queue deep
    assert score(pool, *quick, *slow) == [1.0] * 58
    assert pool.take_stats().num_timeouts == 0


def test_failures_are_logged_once_for_each_prompt(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    with caplog.at_level(logging.WARNING):
        for sample in range(4):
            pool.submit(("a", sample), prompt("row:1"), "raise")
            pool.submit(("b", sample), prompt("row:2"), "raise")
        pool.collect()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    for prompt_id in ("row:1", "row:2"):
        assert sum(f"prompt_id='{prompt_id}'" in message for message in messages) == 1
    assert all("the missing thing" in message for message in messages)


def test_stats_start_anew_when_taken(make_pool: PoolMaker) -> None:
    pool = make_pool()
    score(pool, "score 1", "slow 0.01", "raise")
    stats = pool.take_stats()
    assert (stats.num_scored, stats.num_errors) == (3, 1)
    assert stats.score_seconds > 0.01
    assert stats.wait_seconds > 0
    assert pool.take_stats() == RewardStats()


def test_signals_to_stop_do_not_end_workers(make_pool: PoolMaker) -> None:
    pool = make_pool(on_error="raise")
    (pid,) = score(pool, "pid")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(int(pid), number)
    assert score(pool, "pid") == [pid]


def test_signals_to_stop_do_not_end_workers_that_are_starting(make_pool: PoolMaker) -> None:
    pool = make_pool(on_error="raise", num_workers=2)
    keepers: set[int] = set()
    while len(keepers) < 2:
        keepers = children_of(os.getpid())
    for pid in keepers | {worker for keeper in keepers for worker in children_of(keeper)}:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    workers = {int(pid) for pid in score(pool, *["pid"] * 50)}
    assert workers <= {worker for keeper in keepers for worker in children_of(keeper)}


def test_programs_of_a_reward_function_hear_the_signals_that_the_trainer_blocks(
    make_pool: PoolMaker,
) -> None:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        pool = make_pool(on_error="raise")
        assert score(pool, *[f"signal_child {number:d}" for number in numbers]) == [
            -number for number in numbers
        ]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("last", [None, "hang", "hang_in_c"])
def test_close_leaves_no_process(make_pool: PoolMaker, tmp_path: Path, last: str | None) -> None:
    pool = make_pool(num_workers=2)
    pool.wait_ready()
    pids = {int(pid) for pid in score(pool, *["pid"] * 20, "child")}
    if last:
        for mark in (tmp_path / "a", tmp_path / "b"):
            pool.submit(mark, prompt(), f"{last} {mark}")
            while not mark.exists():
                time.sleep(0.01)
    pool.close()
    pool.close()
    for pid in pids:
        wait_gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("later", prompt(), "score 1")
    with pytest.raises(RuntimeError, match="closed"):
        pool.collect()


@pytest.mark.parametrize("verb", ["score 1", "hang", "hang_in_c"])
def test_workers_and_their_programs_end_with_a_trainer_that_is_killed(
    tmp_path: Path, verb: str
) -> None:
    (tmp_path / "puppet.py").write_text(PUPPET + EXPECTED)
    program = (
        "import time\n"
        "from tlt_megatron.rewards.workers import RewardPool\n"
        "from tlt_megatron.types import Prompt\n"
        "pool = RewardPool('puppet.py:act', num_workers=1, timeout_s=1000, on_error='zero')\n"
        "row = Prompt(prompt_id='p', draw_index=0, token_ids=(1,))\n"
        "for response in ('pid', 'child'):\n"
        "    pool.submit(response, row, response)\n"
        "rewards = pool.collect()\n"
        f"pool.submit('last', row, {verb!r})\n"
        "print(int(rewards['pid']), int(rewards['child']), flush=True)\n"
        "time.sleep(1000)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{program}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    for pid in pids:
        wait_gone(pid)


@pytest.mark.parametrize(
    "text,error,message",
    [
        ("x = 1\n", ValueError, "has no 'act'"),
        ("import no_such_package\n", ValueError, r"fails to load: .*no_such_package\W*$"),
        ("raise SystemExit(4)\n", ValueError, r"fails to load: SystemExit\(4\)"),
        ("import os\nos._exit(4)\n", RuntimeError, "ended with exit status 4 while it loaded"),
    ],
)
def test_function_that_cannot_be_loaded_fails_at_once(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    spec = f"{tmp_path / 'broken.py'}:act"
    with RewardPool(spec, num_workers=2, timeout_s=30.0, on_error="zero") as pool:
        pool.submit(0, prompt(), "score 1")
        with pytest.raises(error, match=message):
            pool.wait_ready()
        with pytest.raises(error, match=message):
            pool.collect()


def test_key_may_stand_once_in_a_batch(make_pool: PoolMaker) -> None:
    pool = make_pool()
    pool.submit((0, 1), prompt(), "score 1")
    with pytest.raises(ValueError, match=r"rollout_key=\(0, 1\): submitted twice"):
        pool.submit((0, 1), prompt(), "score 1")


@pytest.mark.parametrize(
    "settings", [{"num_workers": 0}, {"timeout_s": 0.0}, {"on_error": "ignore"}]
)
def test_settings_out_of_range_are_refused(make_pool: PoolMaker, settings: dict) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        make_pool(**settings)


def test_pools_work_on_ranks_of_a_live_gloo_world(make_pool: PoolMaker, tmp_path: Path) -> None:
    def rank_sum() -> float:
        import torch
        import torch.distributed as dist

        pool = make_pool(on_error="raise")
        total = torch.tensor(sum(score(pool, f"score {dist.get_rank() + 1}", "score 10")))
        dist.all_reduce(total)
        pool.close()
        return total.item()

    assert run_ranks(2, rank_sum) == [23.0, 23.0]


def test_waiting_for_scores_can_be_given_up(make_pool: PoolMaker) -> None:
    pool = make_pool()
    pool.submit("first", prompt(), "score 0.5")
    assert pool.wait_scored(lambda: False)
    assert pool.collect() == {"first": 0.5}
    pool.submit("second", prompt(), "hang")
    assert not pool.wait_scored(lambda: True)
