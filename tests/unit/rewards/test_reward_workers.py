"""A pool of reward workers: each response gets its own reward, and a failure is raised.

test_reward_isolation.py has all kinds of failures, which count as zero.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.reward_puppet import (
    EXTRA,
    HANG,
    HANG_IN_C,
    RAISE,
    SEEN,
    SHORT_S,
    PoolMaker,
    prompt,
    score,
    scores,
)
from tlt_megatron.rewards.workers import RewardPool


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
            pool.submit((number, batch), prompt(), f"reward = {number}")
        assert scores(pool) == {(number, batch): float(number) for number in numbers}
    assert scores(pool) == {}


def test_function_gets_the_whole_row_as_json_carries_it(make_pool: PoolMaker) -> None:
    pool = make_pool()
    row = prompt(data_source="source", ground_truth="truth", extra_info=EXTRA)
    pool.submit(0, row, f"reward = float(row == ('source', 'truth', {SEEN!r}))")
    assert scores(pool) == {0: 1.0}


def test_async_function_scores_many_responses_at_once(make_pool: PoolMaker) -> None:
    assert score(make_pool("meet"), *["40"] * 40) == [1.0] * 40


@pytest.mark.parametrize(
    "function,response,timeout_s,named",
    [
        ("act", RAISE, 120.0, r"Traceback[\s\S]*puppet\.py[\s\S]*KeyError: 'the missing thing'"),
        ("act_async", "hang", SHORT_S, r"timeout_s=4|TimeoutError"),
    ],
)
def test_failures_are_raised_with_prompt_function_and_cause(
    make_pool: PoolMaker, function: str, response: str, timeout_s: float, named: str
) -> None:
    pool = make_pool(function, timeout_s=timeout_s, on_error="raise")
    with pytest.raises(RuntimeError, match=named) as caught:
        score(pool, "reward = 1", response)
    for text in (f"puppet.py:{function}'", "prompt_id='p1'", "(rollout 1)"):
        assert text in str(caught.value)
    with pytest.raises(RuntimeError, match="prompt_id='p1'"):
        pool.collect()


def test_full_pipe_to_a_hung_worker_holds_nothing_up(make_pool: PoolMaker) -> None:
    pool = make_pool(timeout_s=SHORT_S)
    quick, long = ["reward = 1"] * 50, ["reward = 2  # " + "x" * 300_000] * 4
    assert score(pool, *quick, HANG_IN_C, *long) == [1.0] * 50 + [0.0] + [2.0] * 4


def test_time_spent_in_a_workers_queue_is_not_counted(make_pool: PoolMaker) -> None:
    pool = make_pool(timeout_s=SHORT_S)
    quick, slow = ["reward = 1"] * 50, ["time.sleep(0.5)"] * 9
    assert score(pool, *quick, *slow) == [1.0] * 59  # quick ones make the worker's queue deep


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
    with RewardPool(spec, num_workers=2, timeout_s=120.0, on_error="zero") as pool:
        pool.submit(0, prompt(), "reward = 1")
        with pytest.raises(error, match=message):
            pool.wait_ready()
        with pytest.raises(error, match=message):
            pool.collect()


def test_waiting_for_scores_can_be_given_up(make_pool: PoolMaker) -> None:
    pool = make_pool()
    pool.submit("first", prompt(), "reward = 0.5")
    assert scores(pool) == {"first": 0.5}
    pool.submit("second", prompt(), HANG)
    assert pool.collect(lambda: True) is None
