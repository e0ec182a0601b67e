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
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import free_port
from tests.tiny_task import REPO, REWARD, TLT, check_same_run, make_tiny_task, run
from tests.torchrun_job import HOLDING, Job, saved_step

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
HELD = f"""{REWARD}
{HOLDING}

ROLLOUTS = FOLDER / "run" / "rollouts"
NUM_STEPS = len(list(ROLLOUTS.glob("*")))


def held_score(data_source, solution_str, ground_truth, extra_info=None):
    if len(list(ROLLOUTS.glob("*"))) > NUM_STEPS:
        hold()
    return compute_score(data_source, solution_str, ground_truth)
"""
SETTINGS = (
    *("run.num_steps=3", "rollout.num_prompts=2", "rollout.num_samples=4"),
    *("data.eval=", "logging.trackers=[]", "rollout.max_new_tokens=12"),
    *TLT,
)


def test_a_job_of_two_nodes_that_was_stopped_in_mid_step_and_requeued_equals_the_straight_run(
    tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    task, run_dir = make_tiny_task(tmp_path), tmp_path / "run"
    task.write_text(task.read_text().replace(":compute_score", ":held_score"))
    (tmp_path / "reward.py").write_text(HELD)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start() -> Job:
        """One start of the batch script by Slurm: the first one, or that of a requeued job."""
        slurm = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "NOTES": str(tmp_path),
            "RENDEZVOUS_PORT": str(free_port()),
            "SLURM_SUBMIT_DIR": str(REPO),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "1",
        }
        script = REPO / "launch" / "slurm" / "multi_node.sbatch"
        return start_job(task, run_dir, *SETTINGS, script=script, environment=slurm)

    requeued = tmp_path / "scontrol.txt"  # what scontrol was asked

    # Preempted in its second step: Slurm decides whether the job comes back.
    job = start()
    job.wait_until_held()
    job.process.terminate()
    job.end(0)
    assert saved_step(run_dir) == 1
    assert not requeued.exists()

    # It comes back, and its time limit is near in the third.
    job = start()
    job.wait_until_held()
    job.process.send_signal(signal.SIGUSR1)
    job.end(0)
    assert re.search(r"restored \S*iter_0000001", job.output), job.output
    assert saved_step(run_dir) == 2
    assert requeued.read_text() == "requeue 77\n"

    run(2, task, run_dir, *SETTINGS, "--resume", "auto")
    run(2, task, tmp_path / "straight", *SETTINGS)
    check_same_run(run_dir, tmp_path / "straight")
