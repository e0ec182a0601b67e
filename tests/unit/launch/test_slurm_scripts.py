"""The batch scripts with a srun, scontrol and Python that only note what they are asked: signals,
requeueing, exit codes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
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
# A run that saves for a while when it is told to, and ends with the code in $NOTES/code.
PYTHON = """#!/usr/bin/env bash
trap 'sleep 0.2; touch "$NOTES/saved"; exit $(cat "$NOTES/code")' USR1
printf '%s\\n' "$@" > "$NOTES/arguments.tmp"
mv "$NOTES/arguments.tmp" "$NOTES/arguments"
while [[ ! -e $NOTES/done ]]; do sleep 0.02; done
exit $(cat "$NOTES/code")
"""
SCRIPTS = ("single_node.sbatch", "multi_node.sbatch")


class Job:
    """A batch script under the fake Slurm in `folder`."""

    def __init__(self, script: str, folder: Path, code: int = 0) -> None:
        self.folder = folder
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "code").write_text(str(code))
        environment = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "NOTES": str(folder),
            "PYTHON": str(folder / "python"),
            "SLURM_SUBMIT_DIR": str(REPO),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NAME": "long",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "8",
        }
        self.process = subprocess.Popen(
            ["bash", REPO / "launch" / "slurm" / script, "my.yaml", "run.seed=3"],
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while not (folder / "arguments").exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self, number: signal.Signals | None) -> int:
        if number is None:
            (self.folder / "done").touch()
        else:
            self.process.send_signal(number)
        return self.process.wait(timeout=300)

    @property
    def scontrol(self) -> str | None:
        path = self.folder / "scontrol.txt"
        return path.read_text().strip() if path.exists() else None


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("number", "code", "requeued"),
    [
        (signal.SIGUSR1, 0, "requeue 77"),  # the time limit is near
        (signal.SIGUSR1, 1, None),  # it could not save: it would fail again
        (signal.SIGTERM, 0, None),  # Slurm's decision
        (None, 0, None),
        (None, 1, "requeue 77"),  # it failed again without a new checkpoint: other nodes may help
        (None, 2, None),  # its settings are refused
    ],
)
def test_a_job_saves_when_signalled_and_comes_back_when_it_ran_out_of_time(
    tmp_path: Path, script: str, number: signal.Signals | None, code: int, requeued: str | None
) -> None:
    job = Job(script, tmp_path, code)
    assert job.end(number) == code
    assert (tmp_path / "saved").exists() == (number is not None)
    assert job.scontrol == requeued


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_resumes_in_a_run_folder_of_its_own(tmp_path: Path, script: str) -> None:
    job = Job(script, tmp_path)
    arguments = (tmp_path / "arguments").read_text().split()
    assert job.end(None) == 0
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
    """It ended the batch script if it came before its traps. Here each of them takes a while."""
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
    for name, text in (("fail", RUN_THAT_FAILS), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = f"set -euo pipefail; source {REPO}/launch/slurm/stop.sh; run_with_restarts ./fail run.dir=other run.dir=run"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(tmp_path)}
    environment |= {"NUM_SAVING": str(num_saving), "SLURM_JOB_ID": "77"} | settings
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 1
    assert len((tmp_path / "starts").read_text().split()) == num_starts
    assert (tmp_path / "scontrol.txt").exists() is is_requeued
