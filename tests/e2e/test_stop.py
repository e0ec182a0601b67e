"""How a run ends before its time, through torchrun on two ranks: signals, a killed launcher, a rank that fails.

Rollouts wait for what the test decides, never for a clock: the reward function does not return while a file `hold` exists,
and a pipe in place of a step's record of rollouts keeps rank 0 inside that step.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.tiny_task import REPO, answers, make_tiny_task, run, torchrun, weights

pytestmark = pytest.mark.e2e

REWARD = '''"""The tiny task's reward; it notes each call, waits while `hold` exists and fails once where `fail` exists."""
import pathlib
import time

FOLDER = pathlib.Path(__file__).parent


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(FOLDER / "scored", "a") as file:
        file.write(".")
    while (FOLDER / "hold").exists():
        time.sleep(0.02)
    if (FOLDER / "fail").exists():
        (FOLDER / "fail").unlink()
        raise ZeroDivisionError("this response divides by zero")
    digits = [c for c in solution_str if c.isdigit()]
    return round(4 * sum(c < ground_truth for c in digits) / max(1, len(digits))) / 4
'''
# Rank 0 has twice the work of rank 1, which trains the drafter meanwhile.
SETTINGS = (
    *("run.num_steps=3", "rollout.num_prompts=3", "rollout.num_samples=64"),
    *("rollout.max_new_tokens=48", "data.eval=", "logging.tensorboard=false"),
)
SPOT = (
    *("speculation.enabled=true", "speculation.strategies=['3_1_3']"),
    *("spot.enabled=true", "drafter.batch_tokens=64"),
)
FAST, SLOW = "rollout.max_batch_size=64", "rollout.max_batch_size=1"  # the tokens are the same


LIMIT_S = 300.0  # of each wait; a healthy machine needs seconds


class Job:
    """A run under torchrun, or under launch/torchrun.py, and all that it says."""

    def __init__(
        self, config: Path, run_dir: Path, *arguments: str, is_plain: bool = False
    ) -> None:
        self.folder, self.run_dir = config.parent, run_dir
        command = torchrun(2, "--config", config, f"run.dir={run_dir}", *SETTINGS, *arguments)
        if not is_plain:
            command[1:3] = ["launch/torchrun.py"]
        self._output = run_dir.with_suffix(".out")
        self._skip = self._output.stat().st_size if self._output.exists() else 0
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        with self._output.open("a") as output:
            self.process = subprocess.Popen(
                command,
                cwd=REPO,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()[self._skip :]

    def lines(self, part: str) -> list[str]:
        return [line for line in self.output.splitlines() if part in line]

    def line(self, part: str) -> str:
        """The only line with `part` in it."""
        lines = self.lines(part)
        assert len(lines) == 1, f"{part!r} is in {len(lines)} lines:\n{self.output}"
        return lines[0]

    def wait_until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited too long until {what}:\n{self.output}"
            time.sleep(0.02)

    def wait_for_scoring(self) -> None:
        """Until a response of the step under way waits for its score, and most are not generated yet."""
        scored, hold = self.folder / "scored", self.folder / "hold"
        scored.unlink(missing_ok=True)
        hold.touch()
        self.wait_until(scored.is_file, "a response is scored")

    def end(self, code: int) -> None:
        """It ends by itself, with that exit code and without a traceback."""
        assert self.process.wait(timeout=LIMIT_S) == code, self.output
        assert "Traceback" not in self.output, self.output
        (self.folder / "hold").unlink(missing_ok=True)

    def family(self) -> list[psutil.Process]:
        """torchrun, ranks, reward workers, resource trackers."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    config = make_tiny_task(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    return config


@pytest.fixture
def start(task: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(name: str, *arguments: str, is_plain: bool = False) -> Job:
        jobs.append(Job(task, task.parent / name, *arguments, is_plain=is_plain))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            for process in job.family():
                process.kill()


def saved_step(run_dir: Path) -> int:
    return int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


def test_a_run_that_was_stopped_three_times_equals_the_straight_run(
    task: Path, start: Callable[..., Job]
) -> None:
    run_dir, resume = task.parent / "stopped", ("--resume", "auto")

    # SIGTERM in the first rollouts: the state of the beginning, although rewards are in flight and rank 1 trains.
    job = start("stopped", SLOW, *SPOT)
    job.wait_for_scoring()
    job.process.terminate()
    job.end(0)
    assert saved_step(run_dir) == 0
    assert json.loads((run_dir / "summary.json").read_text())["num_steps"] == 0
    job.line("SIGTERM: the run stops")
    job.line("saved step 0 of 3; resume with: --resume auto run.dir=")

    # SIGUSR1 after the rollouts of a step: the save follows its update.
    job = start("stopped", FAST, *SPOT, *resume)
    job.wait_for_scoring()
    record = run_dir / "rollouts" / "step_0000001.jsonl"
    record.parent.mkdir(exist_ok=True)
    os.mkfifo(record)
    (job.folder / "hold").unlink()
    with open(os.open(record, os.O_RDONLY | os.O_NONBLOCK)) as pipe:
        # Rank 0 has come to write more than a pipe holds, and waits until it is read.
        job.wait_until(lambda: select.select([pipe], [], [], 0)[0], "the update is done")
        job.process.send_signal(signal.SIGUSR1)
        job.wait_until(lambda: job.lines("SIGUSR1: the run stops"), "the signal is heard")
        os.set_blocking(pipe.fileno(), True)
        text = pipe.read()
    assert len(text) > 1 << 16, "rank 0 did not wait"
    record.unlink()
    record.write_text(text)
    job.end(0)
    assert saved_step(run_dir) == 1
    folder = run_dir / "checkpoints" / "iter_0000001"
    written_ns = folder.stat().st_mtime_ns

    # Ctrl-C under plain torchrun, which fails even so; what is on the disk is not saved again.
    job = start("stopped", SLOW, *resume, is_plain=True)
    job.wait_for_scoring()
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.process.wait(timeout=LIMIT_S) == 1
    (task.parent / "hold").unlink()
    job.line("SIGINT: the run stops")
    job.line("saved step 1 of 3")
    assert folder.stat().st_mtime_ns == written_ns

    run(2, task, run_dir, *SETTINGS, FAST, *SPOT, *resume)
    run(2, task, task.parent / "straight", *SETTINGS, FAST)
    assert answers(run_dir) == answers(task.parent / "straight")
    for name, tensor in weights(task.parent / "straight").items():
        assert torch.equal(weights(run_dir)[name], tensor), name


def test_second_ctrl_c_ends_at_once_although_a_rank_is_frozen(start: Callable[..., Job]) -> None:
    job = start("frozen", SLOW)
    job.wait_for_scoring()
    family = job.family()
    ranks = [p for p in family if os.getpgid(p.pid) == p.pid and p.ppid() == job.process.pid]
    ranks[1].suspend()
    os.killpg(job.process.pid, signal.SIGINT)
    job.wait_until(lambda: job.lines("Ctrl-C again ends it at once"), "the first is heard")
    os.killpg(job.process.pid, signal.SIGINT)
    job.end(128 + signal.SIGKILL)
    job.line("second Ctrl-C: nothing more is saved")
    assert not psutil.wait_procs(family, timeout=LIMIT_S)[1]


def test_no_process_outlives_a_killed_torchrun(start: Callable[..., Job]) -> None:
    job = start("orphans", SLOW, is_plain=True)
    job.wait_for_scoring()
    family = job.family()
    assert len(family) >= 5
    job.process.kill()
    (
        job.folder / "hold"
    ).unlink()  # a reward function that never returns is ended after its timeout
    assert not psutil.wait_procs(family, timeout=LIMIT_S)[1]


def test_an_error_of_a_rank_is_one_line_and_ends_all(start: Callable[..., Job]) -> None:
    job = start("failed", SLOW)
    job.wait_for_scoring()
    (job.folder / "fail").touch()
    (job.folder / "hold").unlink()
    job.end(1)
    line = job.line("failed in ")
    assert line.startswith("pretrain_rl: rank ")
    assert f" on {os.uname().nodename} failed in REWARD after step 0: RuntimeError: " in line
    assert "ZeroDivisionError: this response divides by zero" in line
    job.line("rror")
    logs = [path.read_text() for path in sorted((job.run_dir / "logs").iterdir())]
    assert sum("Traceback" in text for text in logs) >= 1
    assert sum("the run ends: " in text or "Traceback" in text for text in logs) == 2


def test_bad_input_that_all_ranks_find_is_said_once(start: Callable[..., Job]) -> None:
    job = start("refused", FAST, "data.max_prompt_tokens=2")
    job.end(2)
    line = job.line("pretrain_rl:")
    assert "all 24 prompts are longer than data.max_prompt_tokens=2" in line


def test_bad_input_that_one_rank_finds_ends_all_before_it_has_closed(
    task: Path, start: Callable[..., Job]
) -> None:
    """Rank 0 learns the reason and the exit code while rank 1 still ends its reward workers."""
    (task.parent / "reward.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "first = Path(__file__).with_name('rank 1 loads')\n"
        "if os.environ['RANK'] == '1':\n"
        "    try:\n"
        "        first.touch(exist_ok=False)\n"
        "    except FileExistsError:\n"
        "        time.sleep(60)\n"
        "    raise ValueError('no judge on this host')\n" + REWARD
    )
    job = start("refused", FAST, "reward.num_workers=2")
    job.end(2)
    line = job.line("pretrain_rl:")
    assert "fails to load: ValueError('no judge on this host')" in line
    log = (job.run_dir / "logs" / "rank_00000.log").read_text()
    assert "the run ends: " in log
    assert "no judge on this host" in log
