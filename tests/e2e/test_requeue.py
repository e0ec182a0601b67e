"""A job of two nodes that is stopped in the middle of a step, or loses a node, and comes back:
launch/slurm/multi_node.sbatch, run by bash.

srun is a stand-in that starts the script's command once per node on this machine; scontrol only
notes what it is asked. Steps do not end by themselves: the reward function waits in the step after
the first one of each start.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import LIMIT_S, free_port
from tests.tiny_task import REPO, REWARD, TLT, check_same_run, make_tiny_task, run
from tests.torchrun_job import HOLDING, Job, saved_step

pytestmark = pytest.mark.e2e

# As Slurm's own: SIGUSR1 goes to the tasks of all nodes, a SIGTERM kills them; the exit code is
# that of a task that failed. node0.sh and node1.sh, if there, make nodes differ.
SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
command=("${@/%node1/127.0.0.1}")
tasks=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  (
    [[ ! -e $NOTES/node$node.sh ]] || source "$NOTES/node$node.sh"
    export SLURM_NODEID=$node
    exec "${command[@]/%29500/$RENDEZVOUS_PORT}"
  ) &
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
NUM_FILES = len(list(ROLLOUTS.glob("*")))  # one of each rank for each step


def held_score(data_source, solution_str, ground_truth, extra_info=None):
    num_files = len(list(ROLLOUTS.glob("*")))
    if num_files > NUM_FILES:
        (FOLDER / f"held after step {{(num_files + 1) // 2}}").touch()
        hold()
    return compute_score(data_source, solution_str, ground_truth)
"""
SETTINGS = (
    *("run.num_steps=3", "rollout.num_prompts=2", "rollout.num_samples=4"),
    *("data.eval=", "logging.trackers=[]", "rollout.max_new_tokens=12"),
    *TLT,
)


class Cluster:
    """Nodes in `folder`, and a job on them whose steps hold."""

    def __init__(self, folder: Path, start_job: Callable[..., Job]) -> None:
        self.task, self.run_dir = make_tiny_task(folder), folder / "run"
        self.requeued = folder / "scontrol.txt"  # what scontrol was asked
        self._folder, self._start_job = folder, start_job
        self.task.write_text(self.task.read_text().replace(":compute_score", ":held_score"))
        (folder / "reward.py").write_text(HELD)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def start(self, *settings: str, num_nodes: int = 2) -> Job:
        """One start of the batch script by Slurm: the first one, or that of a requeued job."""
        slurm = {
            "PATH": f"{self._folder}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "NOTES": str(self._folder),
            "RENDEZVOUS_PORT": str(free_port()),
            "SLURM_SUBMIT_DIR": str(REPO),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": str(num_nodes),
            "SLURM_GPUS_ON_NODE": "1",
        }
        script = REPO / "launch" / "slurm" / "multi_node.sbatch"
        return self._start_job(
            self.task, self.run_dir, *SETTINGS, *settings, script=script, environment=slurm
        )


def test_a_job_of_two_nodes_that_was_stopped_in_mid_step_and_requeued_equals_the_straight_run(
    tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    cluster = Cluster(tmp_path, start_job)
    run_dir, requeued = cluster.run_dir, cluster.requeued

    # Preempted in its second step: Slurm decides whether the job comes back.
    job = cluster.start()
    job.wait_until_held()
    job.process.terminate()
    job.end(0)
    assert saved_step(run_dir) == 1
    assert not requeued.exists()

    # It comes back, and its time limit is near in the third.
    job = cluster.start()
    job.wait_until_held()
    job.process.send_signal(signal.SIGUSR1)
    job.end(0)
    assert re.search(r"restored \S*iter_0000001", job.output), job.output
    assert saved_step(run_dir) == 2
    assert requeued.read_text() == "requeue 77\n"

    run(2, cluster.task, run_dir, *SETTINGS, "--resume", "auto")
    run(2, cluster.task, tmp_path / "straight", *SETTINGS)
    check_same_run(run_dir, tmp_path / "straight")


def kill_agent(job: Job, node: int) -> None:
    """As if the node had died: of its processes only the launcher is killed, and the others end
    with it.
    """
    for process in job.family():
        is_launcher = "launch/torchrun.py" in process.cmdline()
        if is_launcher and process.environ().get("SLURM_NODEID") == str(node):
            process.kill()
            return
    raise AssertionError(f"node {node} has no launcher")


def test_a_job_that_loses_a_node_goes_on_from_its_checkpoint_with_two_nodes_and_with_one(
    tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    cluster, saving = Cluster(tmp_path, start_job), "checkpoint.interval=1"
    job = cluster.start(saving)
    job.wait_until_held()  # in its second step
    kill_agent(job, node=1)
    job.wait_until(lambda: "restart 1 of 3, from checkpoint 1" in job.output, "its restart")
    job.wait_until((tmp_path / "held after step 2").exists, "its third step")
    assert saved_step(cluster.run_dir) == 2
    (tmp_path / "hold").unlink()
    assert job.process.wait(timeout=LIMIT_S) == 0
    assert not cluster.requeued.exists()
    straight = tmp_path / "straight"
    run(2, cluster.task, straight, *SETTINGS, saving)
    check_same_run(cluster.run_dir, straight)
    logs = [path.parent.name for path in (cluster.run_dir / "logs").rglob("rank_*.log")]
    assert sorted(logs) == ["node_0000", "node_0001"]

    job = cluster.start(saving, "run.num_steps=4", num_nodes=1)
    job.end(0)
    assert re.search(r"restored \S*iter_0000003", job.output), job.output
    assert saved_step(cluster.run_dir) == 4

    job = cluster.start(saving, "run.num_steps=5", "parallel.tensor=2", num_nodes=1)
    job.end(2)
    line = job.line("parallel.tensor=")
    assert "parallel.tensor=2 x parallel.pipeline=1 = 2 does not divide the 1 ranks" in line
    assert "restart" not in job.output
    assert not cluster.requeued.exists()
