"""A run with SGLang on a machine that has another release of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_task import run_ending


def test_a_run_with_another_release_ends_with_one_line(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "sglang-0.5.24.dist-info"  # what `importlib.metadata` reads of a package
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.24\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = run_ending(2, 2, config, tmp_path / "run", "rollout.engine=sglang")
    assert said.count("needs sglang==0.5.23; installed: 0.5.24") == 1
