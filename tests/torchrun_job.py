"""A run under torchrun that a test holds at a point and then stops: a process, its output, and
files that both sides watch.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.ranks import LIMIT_S
from tests.tiny_task import REPO, torchrun

# The start of a file with a reward function or an environment. `hold` notes that it was called and
# waits while `hold` exists.
HOLDING = """
import pathlib
import time

FOLDER = pathlib.Path(__file__).parent


def hold():
    with open(FOLDER / "called", "a") as file:
        file.write(".")
    while (FOLDER / "hold").exists():
        time.sleep(0.02)
"""


class Job:
    """A run on two ranks under launch/torchrun.py, plain torchrun or `tlt train`, and all that it
    says.
    """

    def __init__(
        self,
        config: Path,
        run_dir: Path,
        *arguments: str,
        is_plain: bool = False,
        is_tlt: bool = False,
        script: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`script` is started in place of the trainer, with the same settings."""
        self.folder, self.run_dir = config.parent, run_dir
        (self.folder / "called").unlink(missing_ok=True)
        (self.folder / "hold").touch()  # before the start, so that no step comes too early
        command = torchrun(2, "--config", config, f"run.dir={run_dir}", *arguments)
        if not is_plain:
            command[1:6] = ["launch/torchrun.py", "--standalone"]
        if is_tlt:
            command[1:2] = ["-m", "tlt_megatron.cli", "train"]
            command.remove("launch/pretrain_rl.py")
        if script is not None:
            command = ["bash", str(script), str(config), f"run.dir={run_dir}", *arguments]
        self._output = run_dir.with_suffix(".out")
        self._skip = self._output.stat().st_size if self._output.exists() else 0
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        with self._output.open("a") as output:
            self.process = subprocess.Popen(
                command,
                cwd=REPO,
                env={**os.environ, **own, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_bytes()[self._skip :].decode()

    def lines(self, part: str) -> list[str]:
        return [line for line in self.output.splitlines() if part in line]

    def line(self, part: str) -> str:
        """Return the only line with `part` in it."""
        lines = self.lines(part)
        assert len(lines) == 1, f"{part!r} is in {len(lines)} lines:\n{self.output}"
        return lines[0]

    def go_on(self, words: str) -> None:
        """Run the command that it printed in the line after the one with `words`, to the end."""
        lines = self.output.splitlines()
        command = lines[lines.index(self.line(words)) + 1]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        (self.folder / "hold").unlink(missing_ok=True)
        with self._output.open("a") as output:
            ended = subprocess.run(
                ["bash", "-c", command], cwd=REPO, env=environment, stdout=output, stderr=output
            )
        assert ended.returncode == 0, self.output

    def wait_until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited too long until {what}:\n{self.output}"
            time.sleep(0.02)

    def wait_until_held(self) -> None:
        """Wait until `hold` of HOLDING is called: then a response of the step under way waits for
        its score or answer.
        """
        self.wait_until((self.folder / "called").is_file, "a response waits")

    def end(self, code: int) -> None:
        """Wait until it ends by itself. It must end with that exit code and without a traceback."""
        assert self.process.wait(timeout=LIMIT_S) == code, self.output
        assert "Traceback" not in self.output, self.output
        (self.folder / "hold").unlink(missing_ok=True)

    def open_ports(self) -> set[tuple[str, int]]:
        """Return the addresses at which its processes listen."""
        connections = [c for process in self.family() for c in process.net_connections("tcp")]
        return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}

    def family(self) -> list[psutil.Process]:
        """Return its processes: torchrun, ranks, reward workers, resource trackers."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


def saved_step(run_dir: Path) -> int:
    return int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
