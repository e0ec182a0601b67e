"""The benchmark of drift: means over blocks, equal steps, its rewards and its figure."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from tests.unit.tools.test_bench_step import make_run
from tests.unit.tools.test_report import figures
from tools.bench import drift_rewards
from tools.bench.drift import draw, summarize
from tools.bench.drift_rewards import terse, wordy
from tools.commands.compare_runs import Run


def runs() -> dict[str, Run]:
    speculative = {
        "drafter__live_accept_length": [2.0, 4.0, 6.0],
        "actor__kl_loss": [0.0, 0.1, 0.5],
    }
    seconds = [1.0, 2.0, 3.0]
    ngram = {"rollout__spec_accept_length": [1.5, 1.5, math.nan]}
    return {
        "frozen": make_run(seconds, timing_s__gen=seconds, **speculative),
        "ngram": make_run(seconds, token=4, timing_s__gen=seconds, **ngram),
    }


def test_values_are_means_over_blocks_of_steps() -> None:
    found = summarize(runs(), block=2)
    assert found["last_steps"] == [2, 3]
    assert found["kl"] == pytest.approx([0.05, 0.5])
    assert found["accept_length"]["frozen"] == [3.0, 6.0]
    assert found["accept_length"]["ngram"][0] == 1.5
    assert math.isnan(found["accept_length"]["ngram"][1])  # nothing was drafted
    assert found["step_s"]["frozen"] == [1.5, 3.0]
    assert found["equal"] == {"frozen": 3, "ngram": 0}


def test_the_figure_has_a_line_for_each_variant_and_seed_over_steps_and_over_kl() -> None:
    page = figures(draw({seed: summarize(runs(), block=1) for seed in (0, 1)}))
    for axis, x in (("last_steps", [1, 2, 3]), ("kl", [0.0, 0.1, 0.5])):
        curves = {curve["name"]: curve for curve in page[axis]["data"]}
        assert len(curves) == 2 * 2
        assert (curves["frozen, seed 1"]["x"], curves["frozen, seed 1"]["y"]) == (x, [2, 4, 6])
        assert curves["ngram, seed 0"]["x"] == x[:2]  # nothing was drafted in the last block


def test_the_rewards_pull_in_opposite_directions() -> None:
    short, long = "3####1", "3*1:5/61####1"
    assert terse("", short, "1") > terse("", long, "1") > terse("", short, "2")
    assert wordy("", long, "1") > wordy("", short, "1")


def test_the_rewards_load_where_the_tools_are_not_importable() -> None:
    command = f"import runpy; runpy.run_path({drift_rewards.__file__!r})['terse']"
    subprocess.run([sys.executable, "-I", "-c", command], check=True)
