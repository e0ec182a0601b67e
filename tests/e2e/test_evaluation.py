"""`tlt evaluate` on a finished run: the command line, and what the run that it starts leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_task import metric_rows, run, run_forked
from tools.evaluate import evaluation_command

pytestmark = pytest.mark.e2e


def test_a_finished_run_is_evaluated_with_its_settings(config: Path, tmp_path: Path) -> None:
    trained, data = tmp_path / "trained", config.parent / "train.jsonl"
    run(1, config, trained, "run.num_steps=1")
    given = f"{trained} --data {data} --samples 4 --out {tmp_path}/result run.seed=7".split()
    command = evaluation_command(given)
    start = next(i for i, word in enumerate(command) if word.endswith("pretrain_rl.py"))
    ((code, stderr),) = run_forked(1, *command[start + 1 :])
    assert code == 0, stderr
    result = json.loads((tmp_path / "result" / "evaluation.json").read_text())
    assert (result["model"], result["data"]) == (str(trained / "hf"), str(data))
    assert (result["num_samples"], result["seed"]) == (4, 7)
    (row,) = metric_rows(tmp_path / "result")
    metrics = result["metrics"]
    assert metrics["avg@4"] == row["eval/accuracy"]
    assert metrics["pass@1"] <= metrics["pass@2"] <= metrics["pass@4"]
    assert 0 <= metrics["maj@4"] <= 1
    assert not (tmp_path / "result" / "hf").exists()
    assert not list((tmp_path / "result").glob("checkpoints/iter_*"))


def test_a_run_without_an_exported_policy_is_told_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ValueError, match=r"tlt convert --from .* --to FOLDER"):
        evaluation_command([str(tmp_path), "--data", "test.jsonl"])
