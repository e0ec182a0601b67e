"""The watch over another program's processes, with plain children in their place."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tlt_megatron.engines.sglang.processes import (
    EngineProcesses,
    Silence,
    ended_if_late,
    watched,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# Starts a worker, which ends when a line arrives, and says so.
WITH_A_WORKER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
print("started", flush=True)
input()
worker.communicate()
print("ended", flush=True)
time.sleep(600)
"""


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen]:
    child = subprocess.Popen(SLEEP)
    yield child
    child.kill()
    child.wait()


def test_only_the_engines_own_processes_are_ended(bystander: subprocess.Popen) -> None:
    processes = EngineProcesses()
    own = subprocess.Popen(SLEEP)
    processes.note_started()
    later = subprocess.Popen(SLEEP)
    processes.end()
    own.wait(120)  # raises if it still runs
    assert bystander.poll() is None
    assert later.poll() is None
    later.kill()
    later.wait()


def test_a_wait_ends_when_a_process_dies() -> None:
    processes = EngineProcesses()
    own = subprocess.Popen(SLEEP)
    processes.note_started()

    async def answer() -> str:
        return "answer"

    assert asyncio.run(watched(answer(), processes.failure)) == "answer"
    own.kill()
    with pytest.raises(RuntimeError, match=f"process {own.pid} has died"):
        asyncio.run(watched(asyncio.sleep(600), processes.failure))
    own.wait()


def test_a_worker_of_an_engines_process_may_end() -> None:
    """A scheduler starts torch's compile workers, which end by themselves."""
    processes = EngineProcesses()
    command = [sys.executable, "-c", WITH_A_WORKER]
    own = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    told = [own.stdout.readline()]
    processes.note_started()
    print(file=own.stdin, flush=True)
    told.append(own.stdout.readline())
    failure = processes.failure()
    processes.end()
    own.communicate()
    assert told == ["started\n", "ended\n"]
    assert failure is None


def test_a_complaint_ends_a_wait() -> None:
    processes = EngineProcesses()
    processes.note_started()
    processes.complain(3, None)
    with pytest.raises(RuntimeError, match="reported a failure"):
        asyncio.run(watched(asyncio.sleep(600), processes.failure))


def test_a_start_that_takes_too_long_loses_its_processes_those_that_come_late_too() -> None:
    processes = EngineProcesses()
    with ended_if_late(processes, 0.05) as is_late:
        first = subprocess.Popen(SLEEP)
        first.wait(120)
        second = subprocess.Popen(SLEEP)
        second.wait(120)
    assert is_late.is_set()


def test_an_engine_that_sends_nothing_is_noticed_after_a_probe_and_named() -> None:
    processes = EngineProcesses()
    own = subprocess.Popen(SLEEP)
    processes.note_started()
    own.send_signal(signal.SIGSTOP)
    probes: list[str] = []
    silence = Silence(lambda: 7.0, lambda: probes.append("probe"), timeout_s=0.5)
    with pytest.raises(RuntimeError, match=r"sent nothing for sglang.request_timeout_s=0.5"):
        asyncio.run(watched(asyncio.sleep(600), silence.failure))
    assert probes == ["probe"]
    assert f"(pid {own.pid}, stopped)" in processes.describe()
    processes.end()
    own.wait(120)  # raises if it still runs


def test_messages_and_answered_probes_are_no_silence() -> None:
    messages = [0.0]
    silence = Silence(lambda: len(messages), lambda: messages.append(1.0), timeout_s=0.3)

    async def work() -> str:
        while len(messages) < 4:
            await asyncio.sleep(0.01)
        return "done"

    assert asyncio.run(watched(work(), silence.failure)) == "done"


def test_time_in_which_the_rank_itself_was_stopped_is_no_silence() -> None:
    silence = Silence(lambda: 7.0, lambda: None, timeout_s=1.0)
    time.sleep(1.1)  # as if stopped: nobody asks
    assert silence.failure() is None
