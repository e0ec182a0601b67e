"""A drafter can be warmed up in parts, and for a run's own settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_task import make_tiny_task
from tlt_megatron.drafter.checkpoint import load_trainer_state
from tools import warmup_drafter


def _warm_up(folder: Path, *arguments: str) -> None:
    common = ("--config", str(folder / "config.yaml"), "--out", str(folder / "drafter"))
    few = ("--num-prompts", "8", "--num-eval-prompts", "2", "--strategy", "2_1_2")
    warmup_drafter.main([*common, *few, *arguments])


def _num_updates(folder: Path) -> int:
    state = load_trainer_state(folder / "drafter")
    assert state is not None
    return int(state["num_updates"])


def test_a_warm_up_continues_from_what_it_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_task(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write('{"prompt": "1+1+1+1+1+1+1+1+1=", "label": "5"}\n')
    _warm_up(tmp_path, "--resume", "--minutes", "0")  # measures, but has no time to train
    assert _num_updates(tmp_path) == 0
    assert "1 of 25 prompts are longer than data.max_prompt_tokens=16" in caplog.text
    _warm_up(tmp_path, "--resume", "--steps", "3")
    assert _num_updates(tmp_path) == 3
    _warm_up(tmp_path, "--resume", "--steps", "5")
    assert _num_updates(tmp_path) == 5
    assert "accept length, after 3 steps" in capsys.readouterr().out
    _warm_up(tmp_path, "--steps", "2")  # without --resume it starts again
    assert _num_updates(tmp_path) == 2
    assert not (tmp_path / "drafter.partial").exists()


def test_a_run_without_held_out_prompts_is_refused_before_it_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: absent}\ndata: {train: a.jsonl}\n")
    with pytest.raises(SystemExit, match="2"):
        _warm_up(tmp_path)
    assert "--eval is needed: data.eval of --config is empty" in capsys.readouterr().err


def test_a_drafter_of_another_policy_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    make_tiny_task(tmp_path / "one")
    make_tiny_task(tmp_path / "other", kind="llama")
    _warm_up(tmp_path / "one", "--steps", "1")
    (tmp_path / "one" / "drafter").rename(tmp_path / "other" / "drafter")
    with pytest.raises(ValueError, match="belongs to another target"):
        _warm_up(tmp_path / "other", "--resume", "--steps", "2")
