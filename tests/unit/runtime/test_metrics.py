"""metrics.jsonl: what is written, what is refused, and that a resume writes nothing twice."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from tlt_megatron.runtime.metrics import MetricsWriter


def open_writer(run_dir: Path, *, resume_step: int | None = None) -> MetricsWriter:
    return MetricsWriter(run_dir, {}, resume_step=resume_step)


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
    assert rows == [{"step": 1, "a/b": 0.1, "n": 3, "f32": 0.5, "i64": 7}]


def test_non_finite_values_are_null_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer(tmp_path)
    with caplog.at_level(logging.WARNING):
        writer.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert read_rows(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1.0}]
    assert [r.getMessage() for r in caplog.records] == ["step 1: a, b not finite, written as null"]
    writer.close()


def test_fresh_run_in_a_used_folder_keeps_the_earlier_numbers_apart(tmp_path: Path) -> None:
    for offset in (0.1, 0.2, 0.3):
        write_steps(open_writer(tmp_path), range(1, 2), offset)
    names = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    values = [json.loads((tmp_path / name).read_text())["a"] for name in names]
    assert values == [1.1, 1.2, 1.3]
