"""One reward worker as its owner sees it: a program with a pipe each way, in a process group of its own.

Used by `dispatch.Dispatcher`, from one thread. A program started afresh, not a fork: the trainer holds gloo
threads, OpenMP pools and devices, which do not survive a fork; nor is the trainer's `__main__` run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from tlt_megatron.rewards.frames import FrameReader, pack_frame

_READ_BYTES = 1 << 18
# the worker imports from where the trainer does, installed or not
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tlt_megatron.rewards.worker_main import main; "
    "sys.exit(main(sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))"
)
_STUCK_S = 300.0  # on top of the timeout: importing a large library from a slow disk may hold the interpreter long


@dataclass(slots=True, kw_only=True)
class Task:
    """One response on its way to a score."""

    task_id: int
    payload: bytes  # pickled arguments of the reward function
    sent_at: float = 0.0  # monotonic seconds at which its worker could begin with it
    must_run_alone: bool = False  # it was in a worker that ended with several tasks at work


class WorkerProcess:
    """Starts a worker at construction; `flush` and `receive` never block."""

    def __init__(self, spec: str, timeout_s: float, folder: str) -> None:
        self.spec = spec
        seconds = [repr(timeout_s), repr(timeout_s + _STUCK_S)]
        arguments = [json.dumps([str(entry) for entry in sys.path]), spec, *seconds]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self.started_at = time.monotonic()
        self.is_ready = False
        self.is_async = False
        self.in_flight: dict[int, Task] = {}  # in the order in which they were sent
        self.mean_seconds: float | None = None  # of scoring one response, recent ones count more

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def read_fd(self) -> int:
        return self._stdout.fileno()

    @property
    def write_fd(self) -> int:
        return self._stdin.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether the pipe was full: call `flush` again when `write_fd` can be written."""
        return bool(self._unsent)

    def send(self, task: Task) -> None:
        """Take on a task; `flush` writes it."""
        task.sent_at = time.monotonic()
        self.in_flight[task.task_id] = task
        self._unsent += pack_frame((task.task_id, task.payload))

    def flush(self) -> None:
        """Write what the pipe takes."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.write_fd, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()  # it has ended; receive says so

    def receive(self) -> tuple[list[tuple], bool]:
        """The messages that have come, and whether the worker has ended."""
        messages: list[tuple] = []
        try:
            while data := os.read(self.read_fd, _READ_BYTES):
                messages += self._reader.feed(data)
        except BlockingIOError:
            return messages, False
        return messages, True

    def close_input(self) -> None:
        """Ask the worker to end."""
        self._stdin.close()

    def wait_end(self, deadline: float) -> None:
        """Return when the worker has ended, or at `deadline` (monotonic seconds)."""
        while not self.receive()[1] and (left := deadline - time.monotonic()) > 0:
            select.select([self.read_fd], [], [], left)

    def kill(self) -> str:
        """End the worker and all that it started, if they have not ended; how the worker ended, in words."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # before wait: until then the pid is not given away
        self._process.kill()
        status = self._process.wait()
        self._stdin.close()
        self._stdout.close()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
