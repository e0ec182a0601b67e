"""The commands that programs print for the user to paste run as they are printed, from a folder
whose name has to be quoted.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.tiny_task import REPO, TLT, launch, make_tiny_task
from tlt_megatron.cli import main

pytestmark = pytest.mark.e2e
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("printed") / "it's Jürgen's task"
    folder.mkdir()
    return make_tiny_task(folder)


def paste(command: str) -> str:
    """Run a command in bash and return what it says."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=REPO,
        env=ENVIRONMENT,
        input="t1=\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def test_what_a_run_prints_next(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = task.parent / "run"
    done = launch(1, "--config", task, f"run.dir={run}", *TLT, "run.num_steps=1")
    assert done.returncode == 0, done.stderr
    report, watch, chat, evaluate, export = done.stdout.partition("next: ")[2].splitlines()
    assert "report.html" in paste(report)
    paste(chat)
    assert "evaluation.json" in paste(evaluate)
    assert "sglang.launch_server" in paste(export)
    words = ["bash", "-c", f"exec {watch} --port 0"]
    with subprocess.Popen(
        words, cwd=REPO, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as page:
        assert page.stdout is not None
        assert page.stdout.readline().startswith("watch: http://127.0.0.1:")
        page.send_signal(signal.SIGINT)
    (run / "hf").rename(run / "elsewhere")
    assert main(["chat", str(run)]) == 2
    convert = capfd.readouterr().err.splitlines()[-1].partition("has no hf/; ")[2]
    paste(convert.removesuffix(" makes a model of its checkpoint"))
    paste(chat)


def test_what_init_and_migrate_print_next(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = task.parent
    data = ("--data", f"{folder}/train.jsonl", "--gpus", "0", "--out", f"{folder}/mine")
    assert main(["init", "--model", f"{folder}/model", *data]) == 0
    train = capfd.readouterr().out.splitlines()[-1]
    assert "num_steps: 2\n" in paste(f"{train} run.num_steps=2 --print-config")
    script = folder / "theirs.sh"
    settings = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.model.path": folder / "model",
        "data.train_files": folder / "train.jsonl",
        "data.max_prompt_length": 16,
        "data.max_response_length": 24,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": 3,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    script.write_text(shlex.join(["python3", "-m", "verl.trainer.main_ppo", *words]))
    assert main(["migrate", str(script), "--out", f"{folder}/ours.yaml"]) == 0
    plan, train = capfd.readouterr().out.splitlines()[-2:]
    assert "fits" in paste(plan)
    command, _, note = train.partition("   # ")
    assert note == "and its like on 1 other nodes"
    assert "num_steps: 3\n" in paste(f"{command} --print-config")
