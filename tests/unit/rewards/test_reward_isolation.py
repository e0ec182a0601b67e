"""What a reward function may do to its process: print, write and close everywhere, fork, start
programs, die.
"""

from __future__ import annotations

import logging
import re

import pytest

from tests.reward_puppet import (
    CHILD,
    DAEMON,
    DIE,
    HANG,
    HANG_IN_C,
    PID,
    RAISE,
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
    program = """
print("from python")
print("to stderr", file=sys.stderr)
ctypes.CDLL(None).write(1, b"from C\\n", 7)
subprocess.run(["echo", "from a child"])
"""
    pool = make_pool()
    with caplog.at_level(logging.INFO):
        assert score(pool, program) == [1.0]
        pool.close()
    for line in ("loaded", "from python", "to stderr", "from C", "from a child"):
        assert line in output(caplog)
    assert capfd.readouterr() == ("", "")


def test_output_beyond_the_bound_is_cut_and_counted(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    pool.wait_ready()
    flood = f"for _ in range({4 * MAX_OUTPUT_BYTES // 1024}): os.write(1, b'x' * 1023 + b'\\n')"
    with caplog.at_level(logging.INFO):
        assert score(pool, flood, flood) == [1.0, 1.0]
        pool.close()
    assert output(caplog).count("x") <= MAX_OUTPUT_BYTES
    assert "more bytes of output of this step were cut" in output(caplog)


@pytest.mark.parametrize("deed", ["os.closerange(3, 256)", "os.fork()"])
def test_what_hurts_nothing_is_scored(make_pool: PoolMaker, deed: str) -> None:
    first, *rest, last = score(make_pool(), PID, deed, "reward = 1", "reward = 1", PID)
    assert rest == [1.0, 1.0, 1.0]
    assert first == last, "the worker was not replaced"


CLOSED = "the reward function closed the worker's socket"
OTHERS = [f"reward = {i}" for i in range(40)]
STRANGE = """
class Strange:
    def __float__(self): os._exit(6)
reward = Strange()
"""


@pytest.mark.parametrize(
    ("function", "deed", "named"),
    [
        *(
            (function, deed, named)
            for function in ("act", "act_async")
            for deed, named in (
                (RAISE, "KeyError: 'the missing thing'"),
                ("reward = float('nan')", "score=nan: must be a finite number"),
                ("sys.exit(3)", "SystemExit: 3"),
                (DIE, "exit status 3"),
                ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
            )
        ),
        *(
            ("act", f"write_to_sockets({what})", "something else than a score")
            for what in (
                "'garbage', kind=''",
                "'[1]'",
                """'{"task": 99, "score": 1}'""",
                """'{"task": 1, "score": "NaN"}'""",
                "'x' * 3_000_000",
            )
        ),
        ("act", "os.closerange(3, 100000)", f"exit status 1|{CLOSED}"),
        ("act", "os.closerange(0, 100000)\nwhile True: time.sleep(1)", CLOSED),
        ("act", "os.killpg(0, signal.SIGKILL)", r"signal SIGKILL \(out of memory\?\)"),
        ("act", "os.fork() or time.sleep(1000); os._exit(5)", "exit status 5"),
        ("act", STRANGE, "exit status 6"),
        ("act", "raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("act", "raise ValueError('y' * 10_000_000)", "yyyy"),
        ("act", "raise ValueError('\\ud83d')", r"ValueError: \\ud83d"),
    ],
)
def test_what_breaks_a_worker_costs_one_response(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, function: str, deed: str, named: str
) -> None:
    found = outcomes(make_pool(function), OTHERS[0], deed, *OTHERS[1:])
    assert [outcome.score for outcome in found] == [0.0, 0.0, *range(1, 40)]
    assert [outcome.failure for outcome in found] == ["", "error", *[""] * 39]
    (message,) = failures(caplog)
    assert "prompt_id='p1'" in message
    assert re.search(named, message)
    assert len(message) < 20_000


@pytest.mark.parametrize(
    ("function", "deed"),
    [
        ("act", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"),
        ("act", "os.kill(os.getpid(), signal.SIGSTOP)"),
        ("act", HANG_IN_C),
        ("act_async", "hang"),
    ],
)
def test_what_does_not_end_is_ended_at_the_timeout(
    make_pool: PoolMaker, function: str, deed: str
) -> None:
    found = outcomes(make_pool(function, timeout_s=SHORT_S), OTHERS[0], deed, *OTHERS[1:])
    assert [outcome.score for outcome in found] == [0.0, 0.0, *range(1, 40)]
    assert [outcome.failure for outcome in found] == ["", "timeout", *[""] * 39]


@pytest.mark.parametrize("last", [DIE, HANG, "os.killpg(0, 9)"])
def test_programs_end_with_the_worker_that_started_them(make_pool: PoolMaker, last: str) -> None:
    program, own, *rest = score(make_pool(timeout_s=SHORT_S), CHILD, DAEMON, last, "reward = 1")
    assert rest == [0.0, 1.0]
    wait_gone(int(program))
    wait_gone(int(own))


def test_strange_rows_reach_the_function(make_pool: PoolMaker) -> None:
    pool = make_pool("length")
    row = prompt(extra_info={"x": float("inf")})
    pool.submit("lone surrogate", row, "\ud800 \n \x00")
    assert scores(pool) == {"lone surrogate": 5.0}
