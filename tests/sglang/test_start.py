"""Starts that fail: one clear error, in time, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.rollouts import engine_processes, start_sglang


def test_an_engine_that_is_not_up_in_time_is_an_error(policy_folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"not up within sglang.start_timeout_s=3.0"):
        start_sglang(policy_folder, start_timeout_s=3.0)
    assert engine_processes() == []


def test_a_scheduler_that_cannot_start_is_an_error(policy_folder: Path) -> None:
    with pytest.raises(RuntimeError, match="the sglang engine did not start"):
        start_sglang(policy_folder, engine_args={"quantization": "awq"})
    assert engine_processes() == []


def test_a_plugin_that_is_not_loaded_is_an_error(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    with pytest.raises(RuntimeError, match="the plugin tlt_megatron is not loaded"):
        start_sglang(policy_folder)
    assert engine_processes() == []
