"""Every item of `tools/gpu_check.py` at tiny sizes, where nothing but the GPU is pretended: the
script runs when a GPU is there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_task import python
from tools.gpu_check import ITEMS

pytestmark = pytest.mark.e2e
SKIPPED = {"private_groups_cuda", "spot_session_cuda", "mcore_cuda", "pretrain_cuda", "graph_engine_cuda"}  # fmt: skip
MAY_BE_MISSING = {"noise", "attention", "attention_float32", "attention_float64", "rows", "noise_kernel", "attention_kernel", "transformer_engine", "sglang_cuda"}  # fmt: skip

# The plan of docs/hardware.md
FIRST_DAY = ["machine", "launches", "attention", "plain_2048", "planted_1", "rl_quickstart", "noise", "mcore_cuda", "graph_engine_cuda", "rates", "planted_64"]  # fmt: skip


def steps_of(rows: list[dict]) -> dict:
    (row,) = (row for row in rows if row["item"] == "rl_quickstart")
    return {name: row["figures"].get(name) for name in ("step_1", "step_2")}


def run_items(tmp_path: Path, day: str) -> list[dict]:
    given = [
        "--device",
        "cpu",
        "--tiny",
        "--out",
        f"{tmp_path}/{day}",
        "--scratch",
        f"{tmp_path}/s",
    ]
    done = python("tools/gpu_check.py", day, *given, timeout_s=900)
    said = (tmp_path / day / "log.txt").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{said[-8000:]}"
    assert len((tmp_path / day / "table.md").read_text().splitlines()) <= 60
    _, *rows = map(json.loads, (tmp_path / day / "results.jsonl").read_text().splitlines())
    return rows


def test_all_items_run_on_a_pretended_gpu_the_most_valuable_first(tmp_path: Path) -> None:
    rows = run_items(tmp_path, "--first-day")
    assert [row["item"] for row in rows] == FIRST_DAY
    assert [name for name, figures in steps_of(rows).items() if figures] == ["step_1", "step_2"]
    rows += run_items(tmp_path, "--second-day")
    assert len({row["item"] for row in rows}) == len(rows) == len(ITEMS)
    by_status: dict[str, set[str]] = {}
    for row in rows:
        by_status.setdefault(row["status"], set()).add(row["item"])
    assert by_status.pop("missing", set()) <= MAY_BE_MISSING
    assert by_status.pop("skipped") == SKIPPED
    assert by_status.keys() == {"ok"}
    figures = {row["item"]: row["figures"] for row in rows}
    for name, by_strategy in figures["planted_8"].items():
        if name.startswith("accept_"):
            assert all(each["differing"] == 0 for each in by_strategy.values())
            assert by_strategy["6_1_6"]["accept"] > 2
