"""Runs whose responses end at stop strings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.lab import copy_stopped
from tests.tiny_task import (
    TLT,
    check_same_run,
    make_tiny_task,
    metric_rows,
    rollouts,
    run,
    run_ending,
)

pytestmark = pytest.mark.e2e

STOPS = ("4", "<eos>", "b", "+3")
SETTINGS = (
    *("run.num_steps=2", "checkpoint.interval=1", "checkpoint.keep=0", "logging.trackers=[]"),
    *("rollout.stop=['4','<eos>','b','+3']", "eval.stop=['b']"),
)


def test_responses_end_at_stop_strings_with_tlt_without_it_and_after_a_resume(
    tmp_path: Path,
) -> None:
    config = make_tiny_task(tmp_path)
    straight, plain, resumed = (tmp_path / name for name in ("straight", "plain", "resumed"))
    run(2, config, straight, *SETTINGS, *TLT)
    run(2, config, plain, *SETTINGS)
    check_same_run(straight, plain)
    copy_stopped(straight, resumed, 1)
    run(2, config, resumed, *SETTINGS, *TLT, "--resume=auto")
    check_same_run(resumed, straight)
    ends = set()
    for row in rollouts(plain):
        text = row["response"] + ("<eos>" if row["token_ids"][-1] == 1 else "")
        found = [text.find(stop) + len(stop) for stop in STOPS if stop in text]
        assert (row["finish_reason"] == "stop") == bool(found)
        assert len(row["token_ids"]) == 24 or found
        if found:  # its tokens are characters
            assert min(found) == len(text)
            ends.add(next(stop for stop in STOPS if text.endswith(stop)))
    assert ends >= {"4", "<eos>", "b"}
    lengths = [
        row["eval/response_length/mean"] for row in metric_rows(plain) if "eval/accuracy" in row
    ]
    assert min(lengths) > max(row.get("response_length/mean", 0) for row in metric_rows(plain))


def test_bad_stop_strings_are_refused_before_the_run(tmp_path: Path) -> None:
    config = make_tiny_task(tmp_path)
    for setting, line in (
        ("rollout.stop=['a','']", "rollout.stop[1]='': must be a string that is not empty"),
        ("eval.stop=[3]", "eval.stop[0]=3: must be str, not int: put it in quotes"),
    ):
        assert line in run_ending(2, 1, config, tmp_path / "run", setting)
