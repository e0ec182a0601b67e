"""`Trainer` without a YAML file: what it gives the launcher, and what it refuses before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tlt_megatron import Trainer

ROWS = [
    {"prompt": "1+1=", "label": "2"},
    {"prompt": [{"role": "user", "content": "é"}], "label": 3},
]


def settings(trainer: Trainer) -> dict[str, str]:
    pairs = [word.partition("=") for word in trainer._command if "=" in word and "." in word]
    return {key: json.loads(value) for key, _, value in pairs}


def test_rows_are_written_to_the_run_folder(tmp_path: Path) -> None:
    given = {"run.dir": str(tmp_path / "run")}
    first = settings(Trainer(model="some/model", data=ROWS, overrides=given))
    assert first["model.path"] == "some/model"
    file = Path(first["data.train"])
    assert file.parent == tmp_path / "run"
    assert [json.loads(line) for line in file.read_text().splitlines()] == ROWS
    again = settings(Trainer(model="some/model", data=iter(ROWS), overrides=given))
    assert again == first
    other = settings(Trainer(model="some/model", data=ROWS[:1], overrides=given))
    assert other["data.train"] != first["data.train"]
    assert len(file.read_text().splitlines()) == 2, "the rows of an earlier run are kept"


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    given = {"run.dir": tmp_path / "run", "run.num_steps": np.int64(3)}
    rows = [{"prompt": "a", "label": np.float64(0.5), "extra_info": {"x": np.array([1, 2])}}]
    found = settings(Trainer(model="m", data=rows, overrides=given))
    assert (found["run.num_steps"], found["run.dir"]) == (3, str(tmp_path / "run"))
    row = json.loads(Path(found["data.train"]).read_text())
    assert row == {"prompt": "a", "label": 0.5, "extra_info": {"x": [1, 2]}}


@pytest.mark.parametrize("data", ["openai/gsm8k/main:train", Path("rows.jsonl")])
def test_a_name_is_passed_on(data: Any) -> None:
    found = settings(Trainer(model=Path("model"), data=data, overrides={"run.num_steps": 3}))
    assert (found["data.train"], found["model.path"]) == (str(data), "model")
    assert found["run.num_steps"] == 3
    assert found["run.dir"].startswith("runs/trainer-")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({}, "needs a config, or both model and data"),
        ({"model": "m"}, "needs a config, or both model and data"),
        ({"data": ROWS}, "needs a config, or both model and data"),
        ({"model": "m", "data": []}, "data: has no rows"),
        ({"model": "m", "data": 5}, "data=5: must be a file"),
        ({"model": "m", "data": {"prompt": "1"}}, "must be a file, a data set's name, or a list"),
        ({"model": "m", "data": ["12"]}, "data: row 1 is '12': must be a dict"),
        ({"model": "m", "data": [ROWS[0], {"prompt": {1}}]}, "data: row 2 is no JSON: "),
        ({"model": "m", "data": [{"label": float("nan")}]}, "data: row 1 is no JSON: "),
        ({"model": "m", "data": ROWS, "ranks": 0}, "ranks=0: must be an integer >= 1"),
        ({"model": "m", "data": ROWS, "ranks": 1.5}, r"ranks=1\.5: must be an integer >= 1"),
    ],
    ids=repr,
)
def test_what_is_no_data_is_refused(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        Trainer(**arguments, overrides={"run.dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()
