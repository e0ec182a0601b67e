"""launch/torchrun.py: what must not end the thread that passes signals on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
