"""What a reward function may do to its process: print, write and close everywhere, fork, start
programs, die.
"""

from __future__ import annotations

import itertools
import logging
import re

import pytest

from tests.reward_puppet import (
    SHORT_S,
    PoolMaker,
    outcomes,
    prompt,
    score,
    scores,
    wait_gone,
)
from tlt_megatron.rewards.workers import MAX_OUTPUT_BYTES


def output(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.name == "reward_output")


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_output_goes_to_the_log_whoever_prints_it(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    pool = make_pool()
    with caplog.at_level(logging.INFO):
        assert score(pool, "print") == [1.0]
        pool.close()
    for line in ("loaded", "from python", "to stderr", "from C", "from a child"):
        assert line in output(caplog)
    assert capfd.readouterr() == ("", "")


def test_output_beyond_the_bound_is_cut_and_counted(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    pool.wait_ready()
    flood = f"flood {4 * MAX_OUTPUT_BYTES // 1024}"
    with caplog.at_level(logging.INFO):
        assert score(pool, flood, flood) == [1.0, 1.0]
        pool.close()
    assert output(caplog).count("x") <= MAX_OUTPUT_BYTES
    assert "more bytes of output of this step were cut" in output(caplog)


@pytest.mark.parametrize("verb", ["close_range", "fork"])
def test_what_hurts_nothing_is_scored(make_pool: PoolMaker, verb: str) -> None:
    first, *rest, last = score(make_pool(), "pid", verb, "score 1", "score 1", "pid")
    assert rest == [1.0, 1.0, 1.0]
    assert first == last, "the worker was not replaced"


OTHERS = [f"score {i}" for i in range(40)]


@pytest.mark.parametrize(
    ("function", "verb", "named"),
    [
        *(
            (function, verb, named)
            for function in ("act", "act_async")
            for verb, named in (
                ("raise", "KeyError: 'the missing thing'"),
                ("nan", "score=nan: must be a finite number"),
                ("leave", "SystemExit: 3"),
                ("die", "exit status 3"),
                ("crash", "signal SIGSEGV"),
            )
        ),
        ("act", "write_everywhere", "something else than a score was written"),
        ("act", "forge [1]", "something else than a score"),
        ("act", 'forge {"task": 99, "score": 1}', "something else than a score"),
        ("act", 'forge {"task": 1, "score": "NaN"}', "something else than a score"),
        ("act", "forge_long", "something else than a score"),
        ("act", "close_all", "exit status 1|the reward function closed the worker's socket"),
        ("act", "close_all_and_hang", "the reward function closed the worker's socket"),
        ("act", "kill_group", r"signal SIGKILL \(out of memory\?\)"),
        ("act", "fork_and_die", "exit status 5"),
        ("act", "strange", "exit status 6"),
        ("act", "keyboard", "KeyboardInterrupt"),
        ("act", "long_error", "yyyy"),
    ],
)
def test_what_breaks_a_worker_costs_one_response(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, function: str, verb: str, named: str
) -> None:
    found = outcomes(make_pool(function), OTHERS[0], verb, *OTHERS[1:])
    assert [outcome.score for outcome in found] == [0.0, 0.0, *range(1, 40)]
    assert [outcome.failure for outcome in found] == ["", "error", *[""] * 39]
    (message,) = failures(caplog)
    assert "prompt_id='p1'" in message
    assert re.search(named, message)
    assert len(message) < 20_000


@pytest.mark.parametrize(
    ("function", "verb"),
    [*itertools.product(["act"], ["ignore_sigterm", "stop", "hang_in_c"]), ("act_async", "hang")],
)
def test_what_does_not_end_is_ended_at_the_timeout(
    make_pool: PoolMaker, function: str, verb: str
) -> None:
    found = outcomes(make_pool(function, timeout_s=SHORT_S), OTHERS[0], verb, *OTHERS[1:])
    assert [outcome.score for outcome in found] == [0.0, 0.0, *range(1, 40)]
    assert [outcome.failure for outcome in found] == ["", "timeout", *[""] * 39]


@pytest.mark.parametrize("last", ["die", "hang"])
def test_programs_end_with_the_worker_that_started_them(make_pool: PoolMaker, last: str) -> None:
    program, *rest = score(make_pool(timeout_s=SHORT_S), "child", last, "score 1")
    assert rest == [0.0, 1.0]
    wait_gone(int(program))


def test_strange_rows_reach_the_function(make_pool: PoolMaker) -> None:
    pool = make_pool()
    row = prompt(extra_info={"x": float("inf")})
    pool.submit("lone surrogate", row, "length \ud800 \n \x00")
    assert scores(pool) == {"lone surrogate": 5.0}
