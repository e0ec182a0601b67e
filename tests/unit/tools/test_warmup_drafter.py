"""A drafter is warmed up for a run's own settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests.tiny_task import make_tiny_task
from tlt_megatron.config.draft_folder import MTP
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.own_layer import check_own_layer, is_frozen, own_names, stored_layers
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.eagle_folder import load_draft_config, load_trainer_state
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.types import SamplingParams
from tools.commands import warmup_drafter
from tools.commands.load_engine import LoadedPolicy
from tools.tiny_models.add_mtp_layer import add_mtp_layer


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


@pytest.mark.parametrize("kind", ["mimo", "glm4_moe"])
def test_the_checkpoints_own_layer_is_trained_and_written_with_the_model(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_task(tmp_path, kind=kind, has_mtp=True)
    model, out = tmp_path / "model", tmp_path / "drafter"
    (model / "configuration_mine.py").write_text("# code that config.json may name")
    _warm_up(tmp_path, "--steps", "8", "speculation.drafter=own", "drafter.lr=0.01")
    assert "accept length, after 8 steps" in capsys.readouterr().out
    source, written = HfReader(model), HfReader(out)
    assert source.names() == written.names()
    policy = check_model("model", out)
    check_own_layer(out, policy)
    changed = {name for name in source.names() if not torch.equal(source[name], written[name])}
    assert changed <= {*stored_layers(policy, source.names())}
    assert own_names(policy)["fc.weight"] in changed
    assert not [name for name in changed if is_frozen(name)]
    assert (out / "configuration_mine.py").is_file()
    with pytest.raises(ValueError, match=r"--out \S+: must not exist, because it becomes a whole"):
        _warm_up(tmp_path, "speculation.drafter=own")
    with pytest.raises(
        ValueError, match=r"--start \S+: speculation.drafter=own starts from --model"
    ):
        _warm_up(tmp_path, "speculation.drafter=own", "--start", "there")
    with pytest.raises(ValueError, match=r"drafter\.algorithm='eagle3': must be eagle or hass"):
        _warm_up(tmp_path, "speculation.drafter=own", "drafter.algorithm=eagle3")


def test_a_tiny_policy_gets_a_layer_and_answers_the_same(tmp_path: Path) -> None:
    make_tiny_task(tmp_path, kind="llama")
    add_mtp_layer(tmp_path / "model", tmp_path / "mimo")
    found = []
    for name in ("model", "mimo"):
        policy = LoadedPolicy(tmp_path / name, dtype="float64", max_new_tokens=8)
        groups = policy.generate(policy.prompts(tmp_path / "train.jsonl"), policy.params(8))
        found.append([rollout.token_ids.tolist() for group in groups for rollout in group.rollouts])
    assert found[0] == found[1]
    check_own_layer(tmp_path / "mimo", check_model("model", tmp_path / "mimo"))
    assert policy.new_drafter(MTP).config.architecture == MTP
