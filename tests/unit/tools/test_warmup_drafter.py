"""A drafter is warmed up for a run's own settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.tiny_task import make_tiny_task
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.eagle_folder import load_draft_config, load_trainer_state
from tlt_megatron.types import SamplingParams
from tools.commands import warmup_drafter


def _warm_up(folder: Path, *arguments: str) -> None:
    common = ("--config", str(folder / "config.yaml"), "--out", str(folder / "drafter"))
    few = ("--num-prompts", "8", "--num-eval-prompts", "2", "--strategy", "2_1_2")
    warmup_drafter.main([*common, *few, *arguments])


def test_a_warm_up_trains_measures_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_task(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write('{"prompt": "1+1+1+1+1+1+1+1+1=", "label": "5"}\n')
    _warm_up(tmp_path, "--minutes", "0")  # measures, but has no time to train
    assert load_trainer_state(tmp_path / "drafter")["num_updates"] == 0
    assert "--minutes 0 left no time for an optimizer step" in caplog.text
    _warm_up(tmp_path, "--minutes", "0.0001")  # over when the prompts are answered
    assert load_trainer_state(tmp_path / "drafter")["num_updates"] > 0
    assert "more than --minutes 0.0001 in all: training gets another 0 s" in caplog.text
    assert "1 of 25 prompts are longer than data.max_prompt_tokens=16" in caplog.text
    _warm_up(tmp_path, "--steps", "3")
    assert load_trainer_state(tmp_path / "drafter")["num_updates"] == 3
    assert "accept length, after 3 steps" in capsys.readouterr().out
    measured = json.loads((tmp_path / "drafter" / "warm_up.json").read_text())
    assert [row["steps"] for row in measured] == [0, 3]
    assert measured[0]["training_s"] == 0 < measured[1]["training_s"]


def test_the_runs_drafter_and_sampling_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections, params = [], []

    class Trainer(warmup_drafter.DrafterTrainer):
        def __init__(self, model: object, section: DrafterSection) -> None:
            sections.append(section)
            super().__init__(model, section)

    class Policy(warmup_drafter.LoadedPolicy):
        def params(self, *given: int, **settings: float) -> SamplingParams:
            params.append(super().params(*given, **settings))
            return params[-1]

    monkeypatch.setattr(warmup_drafter, "DrafterTrainer", Trainer)
    monkeypatch.setattr(warmup_drafter, "LoadedPolicy", Policy)
    make_tiny_task(tmp_path, num_layers=5)
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    drafter = {"algorithm": "eagle3", "lr": 0.002}
    settings["drafter"] = drafter
    settings["rollout"] |= {"top_p": 0.9, "top_k": 5}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    _warm_up(tmp_path, "--steps", "1", "drafter.batch_tokens=64")
    wanted = DrafterSection(**drafter, batch_tokens=64)
    assert sections == [wanted]
    assert (params[0].top_p, params[0].top_k) == (0.9, 5)
    assert load_draft_config(tmp_path / "drafter").aux_layer_ids == (0, 1, 3)


def test_no_time_between_measurements_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_task(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        _warm_up(tmp_path, "--measure-minutes", "0")
    assert "--measure-minutes 0: must be > 0" in capsys.readouterr().err


def test_without_held_out_prompts_some_are_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_task(tmp_path)
    _warm_up(tmp_path, "--steps", "1", "--prompts", str(tmp_path / "train.jsonl"))
    assert "14 responses" in capsys.readouterr().out  # two to each of seven of eight prompts
