"""Starts that fail, schedulers that hang, ranks that die: one clear error, in time, and no process
left behind.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.sglang.rollouts import engine_processes, is_of_engine, start_sglang
from tests.tiny_task import REPO
from tlt_megatron.engines.sglang import connection

# A rank that starts an engine, stops its scheduler, asks for an answer and says what came of it.
RANK = """
import signal, sys, time
from pathlib import Path
from tests.sglang.rollouts import GREEDY, answers, engine_processes, start_sglang

if __name__ == "__main__":
    print("begin", flush=True)
    engine = start_sglang(Path(sys.argv[1]), rank=int(sys.argv[2]), request_timeout_s=12.0)
    next(p for p in engine_processes() if "schedul" in p.name()).send_signal(signal.SIGSTOP)
    try:
        answers(engine, GREEDY)
    except RuntimeError as error:
        print(error, flush=True)
    time.sleep(600)
"""
ENDED_WITHIN_S = 300.0  # a busy machine imports SGLang's processes, no more


def test_an_engine_that_is_not_up_in_time_is_an_error(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "START_TIMEOUT_S", 3.0)
    with pytest.raises(RuntimeError, match="not up within 3 s"):
        start_sglang(policy_folder)
    assert engine_processes() == []


def test_a_scheduler_that_cannot_start_is_an_error(policy_folder: Path, tmp_path: Path) -> None:
    shutil.copy(policy_folder / "config.json", tmp_path)  # without weights
    with pytest.raises(RuntimeError, match="the sglang engine did not start"):
        start_sglang(tmp_path)
    assert engine_processes() == []


def test_a_plugin_that_is_not_loaded_is_an_error(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    with pytest.raises(RuntimeError, match="the plugin tlt_megatron is not loaded"):
        start_sglang(policy_folder)
    assert engine_processes() == []


@pytest.fixture(scope="module")
def ranks(
    policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[subprocess.Popen]]:
    """Two processes of RANK, 62 and 63, which have begun: one starts while the other waits for its
    scheduler.
    """
    script = tmp_path_factory.mktemp("ranks") / "rank.py"
    script.write_text(RANK)
    # The script lies elsewhere and imports `tests`.
    path = os.pathsep.join([str(REPO), os.environ["PYTHONPATH"]])
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, policy_folder, str(number)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in (62, 63)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "begin\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def sglang_children(rank: subprocess.Popen) -> list[psutil.Process]:
    """Scheduler and detokenizer, as soon as there are both."""
    found: list[psutil.Process] = []
    while len(found) < 2:
        assert rank.poll() is None
        time.sleep(0.05)
        children = psutil.Process(rank.pid).children(recursive=True)
        found = [child for child in children if is_of_engine(child)]
    return found


def check_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=ENDED_WITHIN_S)
    for process in alive:
        process.kill()
    assert alive == []


def test_processes_that_are_still_starting_end_with_their_rank(
    ranks: list[subprocess.Popen],
) -> None:
    rank, _ = ranks
    children = sglang_children(rank)
    rank.kill()
    rank.wait()
    check_ended(children)


def test_a_hung_scheduler_is_named_and_ends_with_its_rank(ranks: list[subprocess.Popen]) -> None:
    _, rank = ranks
    assert rank.stdout is not None
    message = rank.stdout.readline()
    children = sglang_children(rank)
    scheduler = next(child for child in children if child.status() == psutil.STATUS_STOPPED)
    assert f"rank 63 on {socket.gethostname()}: the sglang engine is lost" in message
    assert "it has sent nothing for sglang.request_timeout_s=12" in message
    assert f"sglang::scheduler (pid {scheduler.pid}, stopped)" in message
    rank.kill()
    rank.wait()
    check_ended(children)
