"""What summary.json and the last lines of a run say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tlt_megatron.trainer.finish import tlt_command
from tlt_megatron.trainer.gain import SpeculationGain
from tlt_megatron.trainer.summary import result_lines, summarize


def test_a_summary_by_hand() -> None:
    step = {"timing_s/step": 4.0, "timing_s/gen": 2.0, "perf/rollout_tokens_per_s": 10.0}
    rows = [
        {"step": 0, "eval/accuracy": 0.25},
        step | {"rollout/spec_accept_length": 1.0, "memory/peak_gb/update": 9.0},
        step | {"rollout/spec_accept_length": None, "memory/peak_gb/rollout": 3.0},
        step | {"timing_s/gen": 6.0, "perf/rollout_tokens_per_s": 20.0, "eval/accuracy": 0.5},
    ]
    gain = SpeculationGain(rollout_s_on=1.0, rollout_s_off=2.0, num_differing=1)
    assert summarize(rows, seconds=20.0, gain=gain) == {
        "eval_accuracy_first": 0.25,
        "eval_accuracy_last": 0.5,
        "num_steps": 3,
        "step_time_s_median": 4.0,
        "rollout_tokens_per_s": 16.0,  # 160 tokens in 10 s
        "seconds_total": 20.0,
        "memory_peak_gb": 9.0,
        "memory_planned_gb": None,
        "accept_length_first": 1.0,
        "accept_length_last": 1.0,
        "rollout_speedup": 2.0,
        "step_speedup": 1.5,  # 2 s of rollouts and 2 s of the rest against 4 s and 2 s
        "responses_differing": 1.0,
    }


def test_the_end_of_a_run_has_units_and_leaves_out_what_is_unknown() -> None:
    summary = {
        "eval_accuracy_first": 0.41666,
        "eval_accuracy_last": 0.5833,
        "rollout_tokens_per_s": 15312.3,
        "step_time_s_median": None,
        "num_steps": 3,
        "seconds_total": 1.439,
    }
    assert result_lines(summary) == [
        "held-out accuracy: 0.417 -> 0.583",
        "rollouts: 15,312 generated tokens/s",
    ]
    memory = "memory of a rank: 2.4 GB at its peak, {} GB planned{}"
    for planned, note in ((2.5, ""), (2.1, ", above plan")):
        taken = {"memory_peak_gb": 2.4, "memory_planned_gb": planned}
        assert result_lines(taken) == [memory.format(planned, note)]


def test_the_end_of_a_run_names_a_tlt_that_a_shell_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "tlt").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "")
    assert tlt_command() == str(folder / "tlt")
    monkeypatch.chdir(tmp_path)
    assert tlt_command() == ".venv/bin/tlt"
    monkeypatch.setenv("PATH", str(folder))
    assert tlt_command() == "tlt"
