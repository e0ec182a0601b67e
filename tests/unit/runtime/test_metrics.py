"""metrics.jsonl and TensorBoard: what is written, what is refused, and that a resume writes nothing twice."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tlt_megatron.runtime.metrics import MetricsWriter


def open_writer(
    run_dir: Path,
    *,
    tensorboard: bool = False,
    wandb_project: str = "",
    resume_step: int | None = None,
) -> MetricsWriter:
    return MetricsWriter(
        run_dir, tensorboard=tensorboard, wandb_project=wandb_project, resume_step=resume_step
    )


def write_steps(writer: MetricsWriter, steps: range, offset: float = 0.0) -> None:
    for step in steps:
        writer.write(step, {"a": step + offset})
    writer.close()


def read_rows(run_dir: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_call_is_one_json_row_and_numbers_are_exact(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.write(1, {"a/b": 0.1, "n": 3, "f32": np.float32(0.5), "i64": np.int64(7)})
    rows = read_rows(tmp_path)  # before close: a killed run keeps its rows
    writer.close()
    writer.close()
    assert rows == [{"step": 1, "a/b": 0.1, "n": 3, "f32": 0.5, "i64": 7}]


def test_non_finite_values_are_null_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer(tmp_path)
    with caplog.at_level(logging.WARNING):
        writer.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})
        writer.write(2, {"a": -math.inf})
    assert read_rows(tmp_path) == [
        {"step": 1, "a": None, "b": None, "c": 1.0},
        {"step": 2, "a": None},
    ]
    assert writer.num_nonfinite == 3
    assert [r.getMessage() for r in caplog.records] == [
        "step 1: a, b not finite, written as null; further ones are only counted"
    ]
    writer.close()
    assert "3 non-finite values" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("value", ["1", None, True, torch.tensor(1.0), 1j], ids=repr)
def test_what_is_not_a_number_is_refused_and_leaves_no_row(tmp_path: Path, value: object) -> None:
    writer = open_writer(tmp_path)
    with pytest.raises(ValueError, match=r"metric 'a'=.*: must be a number, not "):
        writer.write(1, {"b": 1.0, "a": value})
    writer.close()
    assert read_rows(tmp_path) == []


def test_a_metric_cannot_take_the_key_of_the_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="metric 'step'"):
        open_writer(tmp_path).write(1, {"step": 2.0})


def test_resume_equals_straight_run(tmp_path: Path) -> None:
    write_steps(open_writer(tmp_path / "straight"), range(1, 7))
    write_steps(open_writer(tmp_path / "resumed"), range(1, 6), offset=0.0)
    write_steps(open_writer(tmp_path / "resumed", resume_step=4), range(4, 7))
    assert read_rows(tmp_path / "resumed") == read_rows(tmp_path / "straight")


def test_resume_drops_the_rows_that_will_come_again_and_a_torn_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_steps(open_writer(tmp_path), range(1, 6), offset=0.5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "a": 6.')
    with caplog.at_level(logging.WARNING):
        write_steps(open_writer(tmp_path, resume_step=4), range(4, 5), offset=0.25)
    assert [row["a"] for row in read_rows(tmp_path)] == [1.5, 2.5, 3.5, 4.25]
    assert "left out 1 torn lines" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_both_rows_of_the_step_before_a_resume_stay(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.write(3, {"a": 1.0})
    writer.write(3, {"eval/accuracy": 0.5})
    writer.close()
    open_writer(tmp_path, resume_step=4).close()
    assert read_rows(tmp_path) == [{"step": 3, "a": 1.0}, {"step": 3, "eval/accuracy": 0.5}]


def test_resume_into_a_new_folder_starts_a_file(tmp_path: Path) -> None:
    write_steps(open_writer(tmp_path, resume_step=4), range(4, 6))
    assert [row["step"] for row in read_rows(tmp_path)] == [4, 5]


def test_fresh_run_in_a_used_folder_keeps_the_earlier_numbers_apart(tmp_path: Path) -> None:
    for offset in (0.1, 0.2, 0.3):
        write_steps(open_writer(tmp_path), range(1, 2), offset)
    names = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    values = [json.loads((tmp_path / name).read_text())["a"] for name in names]
    assert values == [1.1, 1.2, 1.3]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(open_writer(tmp_path, tensorboard=True), range(1, 6))
    write_steps(open_writer(tmp_path, tensorboard=True, resume_step=4), range(4, 7), offset=100.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("a")]
    assert points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0), (6, 106.0)]


def test_wandb_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])  # also on a machine that has it
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match=r"logging\.wandb_project='p': needs the package wandb"):
        open_writer(tmp_path / "run", wandb_project="p")
    assert not (tmp_path / "run").exists()


def test_wandb_gets_every_step_and_the_same_run_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages"
    package.mkdir()
    (package / "wandb.py").write_text(  # stands in for the real one, which talks to a server
        "calls = []\n"
        "class Run:\n"
        "    def log(self, data, *, step): calls.append(('log', step, data))\n"
        "    def finish(self): calls.append(('finish',))\n"
        "def init(**options):\n"
        "    calls.append(('init', options))\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(package)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    write_steps(open_writer(tmp_path / "run", wandb_project="p"), range(1, 2))
    write_steps(open_writer(tmp_path / "run", wandb_project="p", resume_step=2), range(2, 3))
    calls = sys.modules.pop("wandb").calls
    assert [call[0] for call in calls] == ["init", "log", "finish"] * 2
    assert calls[0][1] == calls[3][1]
    assert (calls[0][1]["project"], calls[0][1]["resume"]) == ("p", "allow")
    assert [calls[1][1:], calls[4][1:]] == [(1, {"a": 1.0}), (2, {"a": 2.0})]
