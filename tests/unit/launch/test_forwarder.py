"""launch/torchrun.py: the thread that passes signals on, and the end of a job of two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import LIMIT_S, free_port

REPO = Path(__file__).resolve().parents[3]
# A rank that ends at SIGUSR1. The launcher is stopped for longer than one look and continued before
# it gets the signal.
PROGRAM = """
import os, signal, subprocess, sys, threading, time
sys.path.insert(0, sys.argv[1])
from launch import torchrun

torchrun._LOOK_S = 0.1
torchrun._Forwarder().start()
rank = subprocess.Popen(
    [sys.executable, "-c", "import signal; signal.sigwait([signal.SIGUSR1])"], start_new_session=True
)
# SIGCONT to a process with a handler ends the wait of its forwarder.
signal.signal(signal.SIGCONT, lambda *_: None)
stopper = "for i in 1 2 3; do kill -STOP $0; sleep 0.3; kill -CONT $0; sleep 0.3; done"
shell = subprocess.Popen(["sh", "-c", stopper, str(os.getpid())])
while shell.poll() is None:  # threads come and go, as torch's do
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
os.kill(os.getpid(), signal.SIGUSR1)
try:
    rank.wait(timeout=120)
finally:
    rank.kill()
"""


def test_signals_are_passed_on_after_the_launcher_was_stopped_and_threads_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(REPO)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


# A stopped rank beside one that has failed, as torchrun leaves it: SIGTERM waits.
FROZEN = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
from launch import torchrun

torchrun._LOOK_S = 0.1
torchrun._Forwarder().start()
code = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
rank = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
try:
    rank.wait(timeout=1)  # a suspended run goes on
except subprocess.TimeoutExpired:
    rank.terminate()
    sys.exit(rank.wait(timeout=200) != -signal.SIGKILL)
"""


def test_a_stopped_rank_that_is_asked_to_end_is_killed_and_a_line_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FROZEN, str(REPO)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "is stopped and cannot end by itself: killed" in done.stderr


# Node 1 comes to torchrun's last barrier and asks for the others 3 s later.
LATE = """
import sys, time
from launch import torchrun
from torch.distributed.elastic.utils import store

come = store._barrier_nonblocking

def come_and_sleep(*words, **named):
    key = come(*words, **named)
    time.sleep(3.0)
    return key

store._barrier_nonblocking = come_and_sleep
sys.exit(torchrun.main(sys.argv[1:]))
"""


def test_a_node_that_is_late_at_the_last_barrier_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank.py").touch()
    (tmp_path / "late.py").write_text(LATE)
    options = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {free_port()} rank.py".split()
    nodes = [
        subprocess.Popen(
            [sys.executable, launcher, "--node-rank", str(number), *options],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, launcher in enumerate((REPO / "launch" / "torchrun.py", tmp_path / "late.py"))
    ]
    try:
        ends = []
        for node in nodes:
            said, _ = node.communicate(timeout=LIMIT_S)
            ends.append((node.returncode, said))
        assert ends == [(0, ""), (0, "")]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
