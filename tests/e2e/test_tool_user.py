"""The examples of docs/tool_user.md, with few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_task import REPO, metric_rows, rollouts, run
from tools.tiny_models.tool_task import main

pytestmark = pytest.mark.e2e
EXAMPLES = REPO / "examples"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tool_user") / "task"
    main(["--out", str(folder), "--demonstrations", "90", "--questions", "16"])
    return folder


def test_the_policy_imitates_the_demonstrations(task: Path, tmp_path: Path) -> None:
    own = f"model.path={task}/policy", f"data.train={task}/demonstrations.jsonl"
    run(2, EXAMPLES / "tool_user_sft.yaml", tmp_path / "sft", *own, "run.num_steps=8")
    losses = [row["sft/loss"] for row in metric_rows(tmp_path / "sft") if "sft/loss" in row]
    assert losses[-1] < losses[0]
    assert (tmp_path / "sft" / "hf" / "config.json").is_file()


@pytest.mark.parametrize("name", ["calculator", "python", "lookup"])
def test_each_task_trains(task: Path, tmp_path: Path, name: str) -> None:
    further = EXAMPLES / f"tool_user_{name}.yaml"
    layers = ("--config", str(further)) if further.exists() else ()
    own = f"model.path={task}/policy", f"data.train={task}/{name}.jsonl", "run.num_steps=1"
    run(1, EXAMPLES / "tool_user.yaml", tmp_path / "run", *layers, *own)
    found = rollouts(tmp_path / "run")
    assert len(found) == 64
    assert {row["num_turns"] for row in found} <= {1, 2}
    counted = "found" if name == "lookup" else "tool_calls"
    assert all(counted in row["end"] for row in found)
