"""What a reward function may do to its process: print, write and close everywhere, fork, start programs, die."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reward_puppet import SHORT_S, is_running, prompt, score, scores, wait_gone
from tlt_megatron.rewards.workers import MAX_OUTPUT_BYTES, RewardPool

FUNCTION = """
import ctypes, os, signal, subprocess, sys, time

print("loaded")

def act(data_source, solution_str, ground_truth, extra_info=None):
    verb, _, argument = solution_str.partition(" ")
    if verb == "pid":
        return os.getpid() % 1000000
    if verb == "print":
        print("from python")
        print("to stderr", file=sys.stderr)
        ctypes.CDLL(None).write(1, b"from C\\n", 7)
        subprocess.run(["echo", "from a child"])
    if verb == "flood":
        for _ in range(int(argument)):
            os.write(1, b"x" * 1023 + b"\\n")
    if verb == "write_everywhere":
        for name in os.listdir("/proc/self/fd"):
            try:
                os.write(int(name), b"garbage\\n")
            except OSError:
                pass
    if verb == "close_range":
        os.closerange(3, 256)
    if verb == "close_all":
        os.closerange(3, 100000)
    if verb == "close_all_and_hang":
        os.closerange(0, 100000)
        while True:
            time.sleep(1)
    if verb == "fork":
        os.fork()
    if verb == "ignore_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    if verb == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if verb == "kill_group":
        os.killpg(0, signal.SIGKILL)
    if verb == "out_of_memory":
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "fork_and_die":
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(5)
    if verb.startswith("program"):
        with open(argument, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
        if verb == "program_and_die":
            os._exit(5)
        if verb == "program_and_hang":
            while True:
                pass
    if verb == "keyboard":
        raise KeyboardInterrupt
    if verb == "long_error":
        raise ValueError("y" * 10_000_000)
    if verb == "strange":
        class Strange:
            def __float__(self): os._exit(6)
        return Strange()
    return 1.0
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "function.py").write_text(FUNCTION)
    return f"{tmp_path / 'function.py'}:act"


@pytest.fixture
def pool(spec: str) -> Iterator[RewardPool]:
    with RewardPool(spec, num_workers=1, timeout_s=120.0, on_error="zero") as pool:
        yield pool


@pytest.fixture
def hasty_pool(spec: str) -> Iterator[RewardPool]:
    with RewardPool(spec, num_workers=1, timeout_s=SHORT_S, on_error="zero") as pool:
        pool.wait_ready()
        yield pool


def output(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.name == "reward_output")


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_output_goes_to_the_log_whoever_prints_it(
    pool: RewardPool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert score(pool, "print") == [1.0]
        pool.close()
    for line in ("loaded", "from python", "to stderr", "from C", "from a child"):
        assert line in output(caplog)
    assert capfd.readouterr() == ("", "")


def test_traceback_of_a_function_that_fails_to_load_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.py").write_text("def deep():\n    import no_such_package\ndeep()\n")
    spec = f"{tmp_path / 'broken.py'}:act"
    pool = RewardPool(spec, num_workers=1, timeout_s=120.0, on_error="raise")
    with caplog.at_level(logging.INFO):
        with pytest.raises(ValueError, match="no_such_package") as caught:
            pool.wait_ready()
        pool.close()
    assert "\n" not in str(caught.value)
    assert "in deep" in output(caplog)


def test_output_beyond_the_bound_is_cut_and_counted(
    pool: RewardPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.wait_ready()
    num_lines = 4 * MAX_OUTPUT_BYTES // 1024
    with caplog.at_level(logging.INFO):
        assert score(pool, f"flood {num_lines}", f"flood {num_lines}") == [1.0, 1.0]
        pool.close()
    assert output(caplog).count("x") <= MAX_OUTPUT_BYTES
    assert "more bytes of output of this step were cut" in output(caplog)


@pytest.mark.parametrize("verb", ["close_range", "fork"])
def test_what_hurts_nothing_is_scored(pool: RewardPool, verb: str) -> None:
    first, *rest, last = score(pool, "pid", verb, "x", "x", "pid")
    assert rest == [1.0, 1.0, 1.0]
    assert first == last, "the worker was not replaced"


@pytest.mark.parametrize(
    ("verb", "named"),
    [
        ("write_everywhere", "something else than a score was written to the worker's socket"),
        ("close_all", "exit status 1|the reward function closed the worker's socket"),
        ("close_all_and_hang", "the reward function closed the worker's socket"),
        ("out_of_memory", r"signal SIGKILL \(out of memory\?\)"),
        ("kill_group", "signal SIGKILL"),
        ("fork_and_die", "exit status 5"),
        ("strange", "exit status 6"),
        ("keyboard", "KeyboardInterrupt"),
        ("long_error", "yyyy"),
    ],
)
def test_what_breaks_a_worker_costs_one_response(
    pool: RewardPool, caplog: pytest.LogCaptureFixture, verb: str, named: str
) -> None:
    assert score(pool, "x", verb, "x", "x") == [1.0, 0.0, 1.0, 1.0]
    (message,) = failures(caplog)
    assert "prompt_id='p1'" in message
    assert re.search(named, message)
    assert len(message) < 20_000
    assert pool.take_stats().num_errors == 1


@pytest.mark.parametrize("verb", ["ignore_sigterm", "stop"])
def test_what_does_not_end_is_ended_at_the_timeout(hasty_pool: RewardPool, verb: str) -> None:
    assert score(hasty_pool, "x", verb, "x") == [1.0, 0.0, 1.0]
    assert hasty_pool.take_stats().num_timeouts == 1


@pytest.mark.parametrize("verb", ["program_and_die", "program_and_hang"])
def test_programs_end_with_the_worker_that_started_them(
    hasty_pool: RewardPool, tmp_path: Path, verb: str
) -> None:
    assert score(hasty_pool, f"{verb} {tmp_path / 'pid'}", "x") == [0.0, 1.0]
    wait_gone(int((tmp_path / "pid").read_text()))


def test_programs_live_while_their_worker_does_and_end_with_the_pool(
    pool: RewardPool, tmp_path: Path
) -> None:
    assert score(pool, f"program {tmp_path / 'pid'}", "x") == [1.0, 1.0]
    program = int((tmp_path / "pid").read_text())
    assert is_running(program)
    pool.close()
    wait_gone(program)


@pytest.mark.parametrize(
    "line",
    [
        '{"task": 99, "score": 1}',
        '{"task": 1, "score": "NaN"}',
        '{"task": 1, "score": 1, "failed": 0}',
        '{"task": [], "score": 1}',
        "[1]",
        "5",
        "{",
        "[" * 100_000,
        "x" * 3_000_000,
    ],
)
def test_what_is_no_score_costs_one_response(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    (tmp_path / "forger.py").write_text(
        "import os\n"
        "def act(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    for name in os.listdir('/proc/self/fd') if solution_str == 'forge' else ():\n"
        "        if 'socket' in os.path.realpath('/proc/self/fd/' + name):\n"
        "            os.write(int(name), (extra_info['line'] + '\\n').encode())\n"
        "    return 1.0\n"
    )
    spec = f"{tmp_path / 'forger.py'}:act"
    with RewardPool(spec, num_workers=1, timeout_s=120.0, on_error="zero") as pool:
        pool.submit("forger", prompt("forger", extra_info={"line": line}), "forge")
        pool.submit("other", prompt("other"), "x")
        assert scores(pool) == {"forger": 0.0, "other": 1.0}
    (message,) = failures(caplog)
    assert "something else than a score" in message
    assert "prompt_id='forger'" in message


def test_strange_rows_reach_the_function(pool: RewardPool) -> None:
    pool.submit("lone surrogate", prompt(extra_info={"x": float("inf")}), "\ud800 \n \x00")
    assert scores(pool) == {"lone surrogate": 1.0}
