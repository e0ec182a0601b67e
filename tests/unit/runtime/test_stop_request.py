"""What signals do to a rank, and which rank shows why a run ends.
tests/faults stops whole runs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.spot_phases import Markers
from tlt_megatron.runtime.events import EventKind, EventLog
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
time.sleep(600)
"""


class SlowStore:
    """The job's store does not answer."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: time.sleep(600)


def train(folder: Path) -> None:
    """A rank that trains although it is told to stop. Its output goes to <folder>/output."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    configure_logging(1, None)
    stop = StopRequest(1)
    stop.listen()
    stop.share(EventLog(SlowStore()))
    stop.begin_training()
    while not stop.is_requested:
        Markers(folder).set("listens")
        time.sleep(0.01)
    Markers(folder).set("stops")
    time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_during_set_up_ends_with_one_line(number: signal.Signals) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", SET_UP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "listening\n"
    rank.send_signal(number)
    _, stderr = rank.communicate(timeout=300)
    assert rank.returncode == 128 + number
    assert stderr == (
        f"pretrain_rl: {number.name} during set-up: the run ends, there is nothing to save\n"
    )


def test_a_second_ctrl_c_ends_at_once_though_the_store_does_not_answer(tmp_path: Path) -> None:
    rank = multiprocessing.get_context("fork").Process(target=train, args=(tmp_path,))
    rank.start()
    try:
        Markers(tmp_path).await_("listens")
        os.kill(rank.pid, signal.SIGINT)
        Markers(tmp_path).await_("stops")
        os.kill(rank.pid, signal.SIGUSR1)  # says nothing new
        os.kill(rank.pid, signal.SIGTERM)  # what torchrun makes of a second Ctrl-C
        rank.join(timeout=300)
        assert rank.exitcode == 128 + signal.SIGTERM
    finally:
        rank.kill()
        rank.join()
    said = (tmp_path / "output").read_text().splitlines()
    assert said[-1] == "pretrain_rl: second Ctrl-C: the run ends at once, nothing more is saved"


def test_one_rank_shows_why_the_run_ends_or_stops() -> None:
    store = dist.HashStore()
    failing, late = StopRequest(1), StopRequest(2)
    for rank in (failing, late):
        rank.share(EventLog(store))
    assert failing.end(2, "data.train: no such file\nand more")
    assert not late.end(1, "the connection to rank 1 is lost")
    assert not failing.end(1, "seen in a broken connection, by the main thread"), "shown once"
    assert not late._tell(EventKind.STOP, "SIGTERM"), "torchrun's signal, because rank 1 failed"
    assert EventKind.STOP not in EventLog(store).firsts()


def test_a_rank_that_fails_alone_before_ranks_can_tell_each_other_shows_it() -> None:
    assert StopRequest(5, is_first_of_node=False).end(1, "rank 5: this card has fallen off the bus")
    assert not StopRequest(5, is_first_of_node=False).end(2, "bad input, which every rank finds")


def test_a_failure_is_described_in_one_line() -> None:
    def described(message: str) -> str:
        return describe_failure(RuntimeError(message), "UPDATE after step 3", 5)

    start = f"rank 5 on {os.uname().nodename} failed in UPDATE after step 3: RuntimeError: "
    assert described("lost") == start + "lost"
    assert described("") == start + "no message"
    traceback = "bad reward: Traceback (most recent call last):\n  File ...\nValueError: 3\n"
    assert described(traceback) == start + "bad reward: ... ValueError: 3"
