"""A reward for code: the last ```python block of the response runs against the tests of the row, in
a process of its own.

It has the standard library only. The process has limits of CPU time, memory, file size and open
files, an empty environment and an empty folder, and, where the kernel lets a user make a network
namespace, no network (the metric `no_network` is 1 then). THIS IS NOT A SECURITY BOUNDARY: the code
runs as your user and can read your files, and a program that looks for the tests in the
interpreter's memory can cheat. Train on code that you do not trust in a container or a virtual
machine without credentials.

    reward:
      function: examples/datasets/code_reward.py:compute_score

The trainer's reward workers add their own limit, `reward.timeout_s`, and end every process that a
call leaves behind.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping

TIMEOUT_S = 10.0  # wall time for all tests of a response; extra_info["timeout_s"] goes over it
_CPU_S, _MEMORY_BYTES, _FILE_BYTES, _OPEN_FILES = 10, 1 << 30, 1 << 20, 32
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # <sched.h>
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_LIBC = ctypes.CDLL(None, use_errno=True)

# Runs in the new process. Output of the tested code is dropped. The result carries a token, so
# `exit(0)` passes no test.
_RUNNER = """
import json, os, sys
task = json.loads(sys.stdin.read())
result = os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(nowhere, fd)
place = {"__name__": "solution"}
passed = 0
try:
    exec(task["setup"], place)
    exec(task["code"], place)
    for test in task["tests"]:
        try:
            exec(test, place)
            passed += 1
        except Exception:
            pass
finally:
    os.write(result, f"{task['token']} {passed}".encode())
"""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
) -> dict[str, float]:
    """Return 1 if all tests pass, else 0, and the share of tests that pass.

    `ground_truth` is JSON: {"setup": code, "tests": [one assert each]}.
    """
    task = json.loads(ground_truth)
    blocks = _BLOCK.findall(solution_str)
    timeout_s = float(str((extra_info or {}).get("timeout_s", TIMEOUT_S)))
    passed = _run(blocks[-1], task["setup"], task["tests"], timeout_s) if blocks else 0
    share = passed / len(task["tests"])
    return {
        "score": float(share == 1.0),
        "tests_passed": share,
        "has_code": float(bool(blocks)),
        "no_network": float(can_cut_network()),
    }


def _run(code: str, setup: str, tests: list[str], timeout_s: float) -> int:
    """Return how many tests pass; 0 if the process is ended or says nothing."""
    token = secrets.token_hex(16)
    task = json.dumps({"code": code, "setup": setup, "tests": tests, "token": token})
    cut = can_cut_network()
    # Files, not pipes: a process that leaves the session would hold a pipe open, and could write
    # without end.
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as answered,
    ):
        given.write(task.encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUNNER],
            stdin=given,
            stdout=answered,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
            preexec_fn=functools.partial(_limit, cut),
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # it has said nothing: 0
        finally:
            _end_session(process.pid)
            process.wait()
        answered.seek(0)
        answer = answered.read()
    said, _, count = answer.decode(errors="replace").partition(" ")
    return int(count) if said == token and count.isdigit() else 0


def _end_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended, with all of its children
        return


def _limit(cut_network: bool) -> None:
    """Set the limits of the new process, before it runs Python."""
    for kind, most in (
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if cut_network:
        _enter_empty_network()


@functools.cache
def can_cut_network() -> bool:
    """Return whether this user can run Python in a network namespace of its own here. A process
    tries it once.
    """
    command = [sys.executable, "-I", "-S", "-c", "import json"]
    try:
        tried = subprocess.run(
            command, cwd="/", preexec_fn=_enter_empty_network, capture_output=True, check=False
        )
    except (OSError, subprocess.SubprocessError):  # not allowed, or Python's files cannot be read
        return False
    return tried.returncode == 0


def _enter_empty_network() -> None:
    if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
