"""Every item of `tools/gpu_check.py` at tiny sizes, where nothing but the GPU is pretended: the
script runs when a GPU is there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_task import python

pytestmark = pytest.mark.e2e
SKIPPED = {"private_groups_cuda", "spot_session_cuda", "mcore_cuda", "pretrain_cuda", "graph_engine_cuda"}  # fmt: skip
MAY_BE_MISSING = {"noise", "attention", "attention_float32", "attention_float64", "rows", "noise_kernel", "attention_kernel", "transformer_engine", "sglang_cuda"}  # fmt: skip


def test_all_items_run_on_a_pretended_gpu(tmp_path: Path) -> None:
    given = ["--device", "cpu", "--tiny", "--out", f"{tmp_path}/out", "--scratch", f"{tmp_path}/s"]
    done = python("tools/gpu_check.py", *given, timeout_s=900)
    said = (tmp_path / "out" / "log.txt").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{said[-8000:]}"
    _, *rows = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
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
    assert len((tmp_path / "out" / "table.md").read_text().splitlines()) <= 60
