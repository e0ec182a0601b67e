"""Runs whose responses are conversations with an environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_task import (
    REPO,
    answers,
    make_tiny_task,
    metric_rows,
    rollouts,
    run,
    run_forked,
    weights,
)

pytestmark = pytest.mark.e2e

STOPS = (
    1,
    2,
    16,
    18,
    23,
    43,
)  # <eos> 0 = > # t: the random policy ends a turn early with one of them

ENVIRONMENT = '''"""Answers, and after the first step ends its run once, in the middle of a conversation."""
import pathlib
import time

import psutil

FOLDER = pathlib.Path(__file__).parent


def answer(messages, data_source, ground_truth, extra_info):
    with open(FOLDER / "asked", "a") as file:
        file.write(".")
    if len(messages) == 4 and (FOLDER / "asked").stat().st_size > 64 and take("stop"):  # 32 x 2 a step
        psutil.Process().parent().parent().terminate()  # the rank, of this worker's keeper
        time.sleep(1000)
    assert ground_truth == "5"
    turn = messages[-1]["content"]
    return [{"role": "tool", "content": "12+" * (len(turn) % 3)}], len(turn) % 5 == 4


def take(name):
    try:
        (FOLDER / name).unlink()
    except FileNotFoundError:
        return False
    return True
'''
SETTINGS = (
    *("rollout.environment_timeout_s=600", "rollout.max_turns=3", "rollout.num_prompts=8"),
    *("rollout.max_observation_tokens=12", "data.eval=", "logging.tensorboard=false"),
)
SPOT = (
    *("speculation.enabled=true", "speculation.strategies=['3_1_3', 'ngram_4']"),
    *("spot.enabled=true", "drafter.batch_tokens=64"),
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a task whose policy ends its turns."""
    config = make_tiny_task(tmp_path_factory.mktemp("task"))
    settings = config.parent / "model" / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": STOPS}))
    (config.parent / "environment.py").write_text(ENVIRONMENT)
    return config


def test_a_stopped_speculative_run_is_a_straight_plain_run(task: Path, tmp_path: Path) -> None:
    environment = f"rollout.environment={task.parent}/environment.py:answer"
    plain, stopped = tmp_path / "plain", tmp_path / "stopped"
    run(2, task, plain, *SETTINGS, environment)
    (task.parent / "asked").unlink()
    (task.parent / "stop").touch()
    arguments = (*SETTINGS, environment, *SPOT, "--resume", "auto")
    run(2, task, stopped, *arguments)
    assert not (task.parent / "stop").exists()
    assert json.loads((stopped / "summary.json").read_text())["num_steps"] in (1, 2)
    run(2, task, stopped, *arguments)

    assert answers(stopped) == answers(plain)
    for name, tensor in weights(plain).items():
        assert torch.equal(weights(stopped)[name], tensor), name
    found = rollouts(plain)
    assert {row["num_turns"] for row in found} == {1, 2, 3}
    assert all(row["loss_mask"][-1] == 1 for row in found if "loss_mask" in row)
    for row in metric_rows(plain):
        mine = [r for r in found if r["policy_version"] == row["step"] - 1]
        lengths = [sum(r.get("loss_mask", [1] * len(r["token_ids"]))) for r in mine]
        assert row["response_length/max"] == max(lengths) <= 24
        assert row["response_length/mean"] == sum(lengths) / len(lengths)
        assert row["rollout/num_turns/mean"] == sum(r["num_turns"] for r in mine) / len(mine)
        assert row["rollout/tool_seconds"] > 0
        assert row["rollout/tool_errors"] == row["rollout/tool_timeouts"] == 0
        assert row["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.parametrize("name", ["calculator", "self_correction"])
def test_an_example_trains(task: Path, tmp_path: Path, name: str) -> None:
    own = ("run.num_steps=2", "data.eval=", "logging.tensorboard=false", "logging.trace=false")
    example = REPO / "examples" / f"{name}.yaml"
    [(code, stderr)] = run_forked(
        1, "--config", example, "--config", task, f"run.dir={tmp_path}/run", *own
    )
    assert code == 0, stderr[-5000:]
    rows = [row for row in metric_rows(tmp_path / "run") if "actor/grad_norm" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert {row["num_turns"] for row in rollouts(tmp_path / "run")} >= {1, 2}
