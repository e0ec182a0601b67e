"""The batch scripts with a srun, scontrol and Python that only note what they are asked: signals,
requeueing, exit codes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
# As Slurm's own: SIGUSR1 reaches the task, a SIGTERM kills it. It becomes the task, so no signal
# can come too early for it.
SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo node1; echo node2; else echo "$*" > "$NOTES/scontrol.txt"; fi
"""
# A run that signals the batch script, if it is to, and saves for a while when it is told to.
PYTHON = """#!/usr/bin/env bash
trap 'sleep 0.2; touch "$NOTES/saved"; exit $CODE' USR1
printf '%s\\n' "$@" > "$NOTES/arguments"
if [[ -n $SIGNAL ]]; then kill "-$SIGNAL" $PPID; while :; do sleep 0.02; done; fi
exit $CODE
"""
SCRIPTS = ("single_node.sbatch", "multi_node.sbatch")


def write_programs(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def run_job(script: str, folder: Path, code: int = 0, signal: str = "") -> int:
    """Run a batch script under the fake Slurm in `folder` and return its exit code. The script
    gets `signal` while its run is under way. The run ends with `code`.
    """
    write_programs(folder, srun=SRUN, scontrol=SCONTROL, python=PYTHON)
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "NOTES": str(folder),
        "CODE": str(code),
        "SIGNAL": signal,
        "PYTHON": str(folder / "python"),
        "SLURM_SUBMIT_DIR": str(REPO),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "long",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    command = ["bash", REPO / "launch" / "slurm" / script, "my.yaml", "run.seed=3"]
    return subprocess.run(command, cwd=folder, env=environment, timeout=300).returncode


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("signal", "code", "requeued"),
    [
        ("USR1", 0, "requeue 77\n"),  # the time limit is near
        ("USR1", 1, None),  # it could not save: it would fail again
        ("TERM", 0, None),  # Slurm's decision
        ("", 0, None),
        ("", 1, "requeue 77\n"),  # it failed again without a new checkpoint: other nodes may help
        ("", 2, None),  # its settings are refused
    ],
)
def test_a_job_saves_when_signalled_and_comes_back_when_it_ran_out_of_time(
    tmp_path: Path, script: str, signal: str, code: int, requeued: str | None
) -> None:
    assert run_job(script, tmp_path, code, signal) == code
    assert (tmp_path / "saved").exists() == bool(signal)
    asked = tmp_path / "scontrol.txt"
    assert (asked.read_text() if asked.exists() else None) == requeued


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_resumes_in_a_run_folder_of_its_own(tmp_path: Path, script: str) -> None:
    assert run_job(script, tmp_path) == 0
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[0] == "launch/torchrun.py"
    if script == "multi_node.sbatch":
        assert "--rdzv-backend" not in arguments  # c10d unpickles what it is sent
        assert "--master-addr" in arguments
    trainer = arguments[arguments.index("launch/pretrain_rl.py") :]
    assert trainer[1:] == [
        *("--resume", "auto", "--config", "my.yaml"),
        *("run.dir=runs/long-77", "run.seed=3"),
    ]
    text = (REPO / "launch" / "slurm" / script).read_text()
    assert "#SBATCH --signal=B:USR1@300\n" in text
    assert "#SBATCH --requeue\n" in text


def test_a_signal_right_after_the_start_reaches_the_run() -> None:
    """A signal before the traps are set would end the script. Here setting each takes a while."""
    script = f"""
source {REPO}/launch/slurm/stop.sh
trap() {{ sleep 0.2; builtin trap "$@"; }}
run_until_stopped bash -c 'trap "exit 3" USR1; kill -USR1 $PPID; while :; do sleep 0.02; done'
"""
    assert subprocess.run(["bash", "-c", script], timeout=300).returncode == 3


RUN_THAT_FAILS = """#!/usr/bin/env bash
echo start >> starts
mkdir -p run/checkpoints
step=$(wc -l < starts)
if [[ $step -le $NUM_SAVING ]]; then echo $step > run/checkpoints/latest_checkpointed_iteration.txt; fi
exit 1
"""


@pytest.mark.parametrize(
    ("num_saving", "settings", "num_starts", "is_requeued"),
    [
        (9, {}, 4, True),  # three restarts
        (2, {}, 3, True),  # the third start saved nothing
        (9, {"RESTARTS": "0"}, 1, True),
        (9, {"SLURM_RESTART_COUNT": "3"}, 4, False),  # it was requeued three times
        (9, {"SLURM_JOB_ID": ""}, 4, False),  # without Slurm
    ],
)
def test_a_run_that_fails_is_started_again_while_checkpoints_are_added(
    tmp_path: Path, num_saving: int, settings: dict[str, str], num_starts: int, is_requeued: bool
) -> None:
    write_programs(tmp_path, fail=RUN_THAT_FAILS, scontrol=SCONTROL)
    script = f"set -euo pipefail; source {REPO}/launch/slurm/stop.sh; run_with_restarts ./fail run.dir=other run.dir=run"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(tmp_path)}
    environment |= {"NUM_SAVING": str(num_saving), "SLURM_JOB_ID": "77"} | settings
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 1
    assert len((tmp_path / "starts").read_text().split()) == num_starts
    assert (tmp_path / "scontrol.txt").exists() is is_requeued
