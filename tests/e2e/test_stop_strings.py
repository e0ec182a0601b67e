"""Runs whose responses end at stop strings. tests/pairs compares them after a resume and on one
rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_task import TLT, metric_rows, rollouts, run, run_ending

pytestmark = pytest.mark.e2e

STOPS = ("4", "<eos>", "b", "+3")


def test_speculated_responses_end_at_the_first_stop_string(config: Path, tmp_path: Path) -> None:
    settings = ("run.num_steps=2", "rollout.stop=['4','<eos>','b','+3']", "eval.stop=['b']")
    run(2, config, tmp_path, *settings, *TLT, "logging.trackers=[]")
    ends = set()
    for row in rollouts(tmp_path):
        text = row["response"] + ("<eos>" if row["token_ids"][-1] == 1 else "")
        found = [text.find(stop) + len(stop) for stop in STOPS if stop in text]
        assert (row["finish_reason"] == "stop") == bool(found)
        assert len(row["token_ids"]) == 24 or found
        if found:  # its tokens are characters
            assert min(found) == len(text)
            ends.add(next(stop for stop in STOPS if text.endswith(stop)))
    assert ends >= {"4", "<eos>", "b"}
    rows = metric_rows(tmp_path)
    lengths = [row["eval/response_length/mean"] for row in rows if "eval/accuracy" in row]
    assert min(lengths) > max(row.get("response_length/mean", 0) for row in rows)


def test_bad_stop_strings_are_refused_before_the_run(config: Path, tmp_path: Path) -> None:
    for setting, line in (
        ("rollout.stop=['a','']", "rollout.stop[1]='': must be a string that is not empty"),
        ("eval.stop=[3]", "eval.stop[0]=3: must be str, not int: put it in quotes"),
    ):
        assert line in run_ending(2, 1, config, tmp_path / "run", setting)
