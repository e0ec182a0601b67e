"""The benchmark of drift: means over blocks, equal steps, its rewards and its figure."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.tools.test_bench_step import make_run
from tests.unit.tools.test_report import figures
from tools.bench import drift, drift_rewards
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
    unfinished = runs()
    del unfinished["ngram"][3]
    assert summarize(unfinished, block=2)["last_steps"] == [2]  # both have reached


def test_the_figure_has_a_line_for_each_variant_and_seed_over_steps_and_over_kl() -> None:
    page = figures(draw({seed: summarize(runs(), block=1) for seed in (0, 1)}))
    for axis, x in (("last_steps", [1, 2, 3]), ("kl", [0.0, 0.1, 0.5])):
        curves = {curve["name"]: curve for curve in page[axis]["data"]}
        assert len(curves) == 2 * 2
        assert (curves["frozen, seed 1"]["x"], curves["frozen, seed 1"]["y"]) == (x, [2, 4, 6])
        assert curves["ngram, seed 0"]["x"] == x[:2]  # nothing was drafted in the last block


def test_seeds_are_repetitions_of_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy's own layer is a variant. The order turns, so no variant is always the first.
    Within a run the variants take turns.
    """
    launched: list[tuple[str, str, int, tuple[str, ...]]] = []

    @contextmanager
    def launching(_: object, *shared: str, root: Path) -> Iterator[drift.Launch]:
        def launch(name: str, num_steps: int, *settings: str) -> Path:
            launched.append((shared[0], name, num_steps, settings))
            return root / name

        yield launch

    def read_run(folder: Path) -> Run:
        step, length = {"off": (6.0, math.nan), "tlt": (3.0, 4.0), "own": (2.0, 5.0)}[folder.name]
        first = step * 2 if folder.parent.name == "8" else step
        lengths = {"drafter__live_accept_length": [length - 1, length + 1]}
        return make_run([first, step], timing_s__gen=[1.0, first / 2], **lengths)

    monkeypatch.setattr(drift, "launching", launching)
    monkeypatch.setattr(drift, "read_run", read_run)
    parser = argparse.ArgumentParser()
    drift.add_options(parser.add_argument)
    words = "--task quickstart --variants off tlt own --steps 2 --block 1 --turn 1 --seeds 7 8"
    options = parser.parse_args(
        [*words.split(), "--drafter", str(_drafter(tmp_path)), "--folder", str(tmp_path)]
    )
    found = drift.run(options)
    assert [each[:3] for each in launched] == [
        *(("run.seed=7", name, end) for end in (1, 2) for name in ("off", "tlt", "own")),
        *(("run.seed=8", name, end) for end in (1, 2) for name in ("tlt", "own", "off")),
    ]
    settings = next(given for _, name, _, given in launched if name == "own")
    assert {"speculation.drafter=own", "spot.enabled=true"} <= {*settings}
    seeds = found["seeds"]
    assert isinstance(seeds, dict)
    assert [*seeds[8]["step_s"]] == ["off", "tlt", "own"]
    table = capsys.readouterr().out.partition("over off, median (min-max) of 2 seeds")[2]
    rows = [line.split("│")[1:-1] for line in table.splitlines() if "own" in line]
    cells = [[cell.strip() for cell in row[1:]] for row in rows]
    assert cells == [
        ["first", "4.00 (4.00-4.00)", "1.00 (1.00-1.00)", "3.00 (3.00-3.00)"],
        ["all", "5.00 (5.00-5.00)", "2.17 (2.00-2.33)", "3.00 (3.00-3.00)"],
    ]


def _drafter(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder


def test_the_rewards_pull_in_opposite_directions() -> None:
    short, long = "3####1", "3*1:5/61####1"
    assert terse("", short, "1") > terse("", long, "1") > terse("", short, "2")
    assert wordy("", long, "1") > wordy("", short, "1")


def test_the_rewards_load_where_the_tools_are_not_importable() -> None:
    command = f"import runpy; runpy.run_path({drift_rewards.__file__!r})['terse']"
    subprocess.run([sys.executable, "-I", "-c", command], check=True)
