"""Who hears of a stop or a failure, and what a rank does then. Ranks are small processes over one store."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tlt_megatron.runtime.log import configure_logging
from tlt_megatron.runtime.stop import StopRequest, describe_failure

SET_UP = """
import sys, time
from tlt_megatron.runtime.log import configure_logging
from tlt_megatron.runtime.stop import StopRequest
assert "torch" not in sys.modules
configure_logging(0, None)
stop = StopRequest()
stop.listen()
print("listening", flush=True)
time.sleep(60)
"""


def train(folder: Path, rank: int, stays: bool) -> None:
    """A rank that trains until it is told to stop. What it says goes to <folder>/<rank>."""
    output = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    configure_logging(rank, None)
    stop = StopRequest(rank, world_size=2)
    stop.listen()
    stop.share(dist.FileStore(str(folder / "store"), -1))
    stop.begin_training()
    print("listening", file=sys.stderr)
    while not stop.is_requested:
        time.sleep(0.01)
    print("stopped", file=sys.stderr)
    if stays:
        time.sleep(60)
    stop.close()


class Ranks:
    """Forks ranks of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[multiprocessing.Process] = []

    def start(self, *, stays: bool = False) -> multiprocessing.Process:
        """A rank that listens already."""
        rank = len(self.started)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=train, args=(self.folder, rank, stays))
        process.start()
        self.started.append(process)
        self.wait_for(rank, "listening")
        return process

    def lines(self, rank: int) -> list[str]:
        path = self.folder / str(rank)
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, rank: int, line: str) -> None:
        deadline = time.monotonic() + 60
        while line not in self.lines(rank):
            assert self.started[rank].is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def join(self, rank: int) -> int | None:
        self.started[rank].join(timeout=60)
        return self.started[rank].exitcode


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    for process in ranks.started:
        process.kill()
        process.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_during_set_up_ends_with_one_line(number: signal.Signals) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", SET_UP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "listening\n"
    rank.send_signal(number)
    _, stderr = rank.communicate(timeout=60)
    assert rank.returncode == 128 + number
    assert stderr == (
        f"pretrain_rl: {number.name} during set-up: the run ends, there is nothing to save\n"
    )


def test_a_signal_to_one_rank_reaches_all_and_a_second_ctrl_c_ends_at_once(ranks: Ranks) -> None:
    ranks.start()
    second = ranks.start(stays=True)
    os.kill(second.pid, signal.SIGINT)
    assert ranks.join(0) == 0
    assert ranks.lines(0) == ["listening", "stopped"]
    ranks.wait_for(1, "stopped")
    os.kill(second.pid, signal.SIGUSR1)  # says nothing new
    os.kill(second.pid, signal.SIGTERM)  # what torchrun makes of a second Ctrl-C
    assert ranks.join(1) == 128 + signal.SIGTERM
    said = ranks.lines(1)
    assert sum("SIGINT: the run stops" in line for line in said) == 1
    assert said[-1] == "pretrain_rl: second Ctrl-C: the run ends at once, nothing more is saved"


def test_a_failed_rank_ends_the_others_with_its_code(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start()
    failing, late = StopRequest(1), StopRequest(2)
    for rank in (failing, late):
        rank.share(dist.FileStore(str(tmp_path / "store"), -1))
    assert failing.end(2, "data.train: no such file\nand more")
    assert not late.end(1, "the connection to rank 1 is lost")
    assert ranks.join(0) == 2
    assert ranks.lines(0) == ["listening"]


def test_a_failure_is_described_in_one_line() -> None:
    def described(message: str) -> str:
        return describe_failure(RuntimeError(message), "UPDATE after step 3", 5)

    start = f"rank 5 on {os.uname().nodename} failed in UPDATE after step 3: RuntimeError: "
    assert described("lost") == start + "lost"
    assert described("") == start + "no message"
    traceback = "bad reward: Traceback (most recent call last):\n  File ...\nValueError: 3\n"
    assert described(traceback) == start + "bad reward: ... ValueError: 3"
