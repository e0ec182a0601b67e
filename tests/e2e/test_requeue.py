"""A job of two nodes that is stopped in the middle of a step and comes back:
launch/slurm/multi_node.sbatch, run by bash.

srun is a stand-in that starts the script's command twice on this machine; scontrol only notes what
it is asked. Steps do not end by themselves: the reward function waits in the step after the first
one of each start.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.ranks import free_port
from tests.tiny_task import REPO, answers, make_tiny_task, run, weights

pytestmark = pytest.mark.e2e

# As Slurm's own: SIGUSR1 goes to the tasks of all nodes, a SIGTERM kills them; the exit code is
# that of a task that failed.
SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
command=("${@/%node1/127.0.0.1}")
tasks=()
for node in 0 1; do
  SLURM_NODEID=$node "${command[@]/%29500/$RENDEZVOUS_PORT}" &
  tasks+=($!)
done
trap 'kill -USR1 "${tasks[@]}"' USR1
trap 'kill -KILL "${tasks[@]}"' TERM
code=0
for task in "${tasks[@]}"; do
  while kill -0 "$task" 2>/dev/null; do wait "$task"; done
  wait "$task" || code=$?
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo node1; echo node2; else echo "$*" >> "$NOTES/scontrol.txt"; fi
"""
NUM_CALLS = 8  # of the reward function in a step
REWARD = f'''"""The tiny task's reward. While `hold` exists, a call after those of the first step does not return."""
import pathlib
import time

FOLDER = pathlib.Path(__file__).parent


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(FOLDER / "called", "a") as file:
        file.write(".")
    while (FOLDER / "called").stat().st_size > {NUM_CALLS} and (FOLDER / "hold").exists():
        time.sleep(0.02)
    digits = [c for c in solution_str if c.isdigit()]
    return round(4 * sum(c < ground_truth for c in digits) / max(1, len(digits))) / 4
'''
SETTINGS = (
    *("run.num_steps=3", "rollout.num_prompts=2", f"rollout.num_samples={NUM_CALLS // 2}"),
    *("data.eval=", "logging.trackers=[]", "rollout.max_new_tokens=12"),
    *("speculation.enabled=true", "speculation.strategies=['3_1_3']"),
    *("spot.enabled=true", "drafter.batch_tokens=64"),
)


class Start:
    """One start of the batch script by Slurm: the first one, or that of a requeued job."""

    def __init__(self, config: Path, run_dir: Path, name: str) -> None:
        self.folder = config.parent
        (self.folder / "called").unlink(missing_ok=True)
        (self.folder / "hold").touch()
        self._output = self.folder / f"{name}.out"
        environment = os.environ | {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPO),
            "PYTHON": sys.executable,
            "NOTES": str(self.folder),
            "RENDEZVOUS_PORT": str(free_port()),
            "SLURM_SUBMIT_DIR": str(REPO),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "1",
        }
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *("bash", REPO / "launch" / "slurm" / "multi_node.sbatch"),
                    *(config, f"run.dir={run_dir}", *SETTINGS),
                ],
                cwd=REPO,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def stop_in_second_step(self, number: signal.Signals) -> int:
        """Signal the batch script while a response of the second step waits for its score; the
        script's exit code.
        """
        called = self.folder / "called"
        deadline = time.monotonic() + 300
        while not called.exists() or called.stat().st_size <= NUM_CALLS:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, f"no second step:\n{self.output}"
            time.sleep(0.02)
        self.process.send_signal(number)
        return self.process.wait(timeout=300)

    @property
    def requeued(self) -> str:
        """What scontrol was asked to requeue by this and earlier starts."""
        path = self.folder / "scontrol.txt"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Path, str], Start]]:
    config = make_tiny_task(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    starts: list[Start] = []

    def start(run_dir: Path, name: str) -> Start:
        starts.append(Start(config, run_dir, name))
        return starts[-1]

    yield start
    for each in starts:
        if each.process.poll() is None:
            process = psutil.Process(each.process.pid)
            for member in [process, *process.children(recursive=True)]:
                member.kill()


def saved_step(run_dir: Path) -> int:
    return int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


def test_a_job_of_two_nodes_that_was_stopped_in_mid_step_and_requeued_equals_the_straight_run(
    tmp_path: Path, start: Callable[[Path, str], Start]
) -> None:
    config, run_dir, straight = (tmp_path / n for n in ("config.yaml", "run", "straight"))

    # Preempted in its second step: Slurm decides whether the job comes back.
    preempted = start(run_dir, "preempted")
    assert preempted.stop_in_second_step(signal.SIGTERM) == 0, preempted.output
    assert saved_step(run_dir) == 1
    assert preempted.requeued == ""
    assert "Traceback" not in preempted.output

    # It comes back, and its time limit is near in the third.
    limited = start(run_dir, "limited")
    assert limited.stop_in_second_step(signal.SIGUSR1) == 0, limited.output
    assert re.search(r"restored \S*iter_0000001", limited.output), limited.output
    assert saved_step(run_dir) == 2
    assert limited.requeued == "requeue 77\n"
    assert "Traceback" not in limited.output

    (tmp_path / "hold").unlink()
    run(2, config, run_dir, *SETTINGS, "--resume", "auto")
    run(2, config, straight, *SETTINGS)
    assert answers(run_dir) == answers(straight)
    for name, tensor in weights(straight).items():
        assert torch.equal(weights(run_dir)[name], tensor), name
