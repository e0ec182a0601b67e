"""What summary.json says of a run that was resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tlt_megatron.runtime.memory_claim import Phase
from tlt_megatron.trainer.finish import result_lines, tlt_command
from tlt_megatron.trainer.history import RunHistory


def test_the_memory_peak_is_that_of_the_whole_run() -> None:
    before, after = RunHistory(), RunHistory()
    before.add_memory({Phase.UPDATE: 9_000_000_000, Phase.ROLLOUT: 2_000_000_000})
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    after.add_memory({Phase.UPDATE: 1_000_000_000, Phase.ROLLOUT: 3_000_000_000})
    assert after.peak_bytes == {Phase.UPDATE: 9_000_000_000, Phase.ROLLOUT: 3_000_000_000}
    assert after.summary()["memory_peak_gb"] == 9.0


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
