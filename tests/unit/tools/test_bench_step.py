"""The benchmark of an RL step compares equal work, and its figures are those of a calculation by hand."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tools.bench.step import COLD, OFF, own_words, turned, variant_overrides
from tools.bench.step_measures import (
    STEP_SECONDS,
    Response,
    Run,
    StepRecord,
    first_step_at,
    idle_figures,
    is_identical,
    num_same_steps,
    phase_seconds,
    read_run,
    rollout_share,
    series,
    speedups,
    timed_steps,
    with_a_tail,
)
from tools.bench.step_tables import print_by_step, print_idle, print_phases


def make_run(
    seconds: list[float],
    tokens: list[list[int]] | None = None,
    rewards: list[float] | None = None,
    **metrics: list[float],
) -> Run:
    """One response per step and prompt: response i of every step is `tokens[i]`."""
    tokens = tokens or [[1, 2, 3]]
    rewards = rewards or [1.0] * len(tokens)
    return {
        step: StepRecord(
            metrics={STEP_SECONDS: value}
            | {name.replace("__", "/"): values[step - 1] for name, values in metrics.items()},
            responses={
                (i, 0): Response(token_ids=tuple(ids), reward=reward)
                for i, (ids, reward) in enumerate(zip(tokens, rewards, strict=True))
            },
        )
        for step, value in enumerate(seconds, start=1)
    }


def test_the_first_step_of_every_round_is_not_timed() -> None:
    assert timed_steps(9, 3) == [2, 3, 5, 6, 8, 9]


def test_speedups_compare_step_with_step_and_the_sums() -> None:
    ratios = speedups(make_run([9.0, 4.0, 2.0]), make_run([1.0, 1.0, 2.0]), [2, 3])
    assert ratios == {"median": 2.5, "min": 1.0, "max": 4.0, "total": 2.0}


def test_phases_are_means_over_the_timed_steps_alone() -> None:
    run = make_run([5.0, 2.0, 4.0], timing_s__gen=[5.0, 1.0, 2.0])
    assert phase_seconds(run, [2, 3]) == {"gen": 1.5, "step": 3.0}
    assert rollout_share(run, [2, 3]) == 0.5


def test_idle_figures_are_shares_of_sums_and_preemptions_of_steps_that_had_one() -> None:
    run = make_run(
        [9.0, 4.0, 6.0],
        bubble__idle_s=[5.0, 2.0, 3.0],
        bubble__used_s=[0.0, 2.0, 2.0],
        bubble__stall_s=[3.0, 0.1, 0.1],
        spot__preempt_ms=[7.0, 0.0, 3.0],
        spot__updates=[0.0, 3.0, 4.0],
    )
    figures = idle_figures(run, [2, 3])
    assert figures["idle_used_fraction"] == pytest.approx(0.8)
    assert figures["stall_fraction"] == pytest.approx(0.02)
    assert figures["preempt_ms"] == {"median": 3.0, "min": 3.0, "max": 3.0}
    assert figures["updates_per_step"] == 3.5


def test_a_run_without_idle_time_has_no_share_of_it() -> None:
    figures = idle_figures(make_run([1.0, 1.0]), [1, 2])
    assert math.isnan(figures["idle_used_fraction"])
    assert figures["preempt_ms"] is None


def test_recovery_is_the_first_step_at_the_share_of_the_median_level() -> None:
    levels = [4.0, None, 5.0, 6.0]
    assert first_step_at([None, 1.0, 4.4, 4.5, 4.0], levels, 0.9) == 4
    assert first_step_at([1.0, 2.0], levels, 0.9) is None
    assert first_step_at([1.0], [None], 0.9) is None


def test_identical_runs_agree_in_every_token_and_reward() -> None:
    run = make_run([1.0, 1.0])
    assert is_identical([run, make_run([2.0, 3.0])])
    assert not is_identical([run, make_run([1.0, 1.0], [[1, 2, 4]])])
    assert not is_identical([run, make_run([1.0, 1.0], rewards=[0.0])])
    assert not is_identical([run, make_run([1.0])])
    assert num_same_steps(run, make_run([1.0, 1.0], rewards=[0.0]), [1, 2]) == 2


def test_every_step_of_the_ordered_prompts_holds_exactly_one_long_one() -> None:
    lengths = list(range(40))
    rows = [{"length": length} for length in lengths]
    ordered = with_a_tail(rows, lengths, num_prompts=4, tail_share=0.1, seed=0)
    assert len(ordered) == 16  # 4 long ones, a step for each
    long = [[row["length"] >= 36 for row in ordered[i : i + 4]] for i in range(0, 16, 4)]
    assert [sum(step) for step in long] == [1, 1, 1, 1]
    assert len({row["length"] for row in ordered}) == 16
    assert len({step.index(True) for step in long}) > 1  # not always on the same rank
    assert ordered == with_a_tail(rows, lengths, num_prompts=4, tail_share=0.1, seed=0)


def test_a_run_is_read_with_its_responses_and_without_what_was_not_finite(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, STEP_SECONDS: 2.0, "drafter/live_accept_length": None},
        {"step": 1, "eval/accuracy": 0.6},
        {"step": 2, STEP_SECONDS: 1.0, "drafter/live_accept_length": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2):
        line = {"draw_index": 7, "sample_index": 1, "token_ids": [step, 5], "reward": 1.0}
        path = tmp_path / "rollouts" / f"step_{step:07d}.jsonl"
        path.write_text(json.dumps(line | {"accept_lengths": [2]}) + "\n")
    run = read_run(tmp_path)
    assert list(run) == [1, 2]
    assert run[2].responses == {(7, 1): Response(token_ids=(2, 5), reward=1.0)}
    assert run[1].metrics["eval/accuracy"] == 0.6
    assert series(run, "drafter/live_accept_length") == [None, 3.0]


def test_every_variant_is_first_once_in_as_many_rounds() -> None:
    names = list(variant_overrides("somewhere"))
    orders = [turned(names, index) for index in range(len(names))]
    assert [order[0] for order in orders] == names
    assert all(sorted(order) == sorted(names) for order in orders)


def test_variants_differ_in_speculation_and_spot_training_alone() -> None:
    variants = variant_overrides("somewhere")
    settings = {override.split("=")[0] for values in variants.values() for override in values}
    assert settings == {"speculation.enabled", "speculation.drafter", "spot.enabled"}
    assert "speculation.enabled=false" in variants[OFF]
    assert "speculation.drafter=" in variants[COLD]


def test_a_failed_run_is_quoted_without_the_account_of_the_launcher() -> None:
    output = "started\nValueError: key\nW1 torch/distributed/elastic/api.py:1 closing\nFAILED\n"
    assert own_words(output) == "started\nValueError: key"


def test_tables_show_what_a_variant_does_not_have_as_a_dash() -> None:
    console = Console(file=StringIO(), width=120)
    phases = {
        "off": {"gen": 2.0, "step": 4.0, "wait": 9.0},
        "tlt": {"gen": 1.0, "step": 2.0, "publish": 0.5},
    }
    print_phases(console, phases, 0.5, num_timed=3)
    print_by_step(console, "accept length", {"tlt": [None, 2.5]})
    print_idle(console, {"tlt": idle_figures(make_run([1.0]), [1])})
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["│", "publish", "│", "-", "│", "0.500", "│"] in rows
    assert [
        "│",
        "other",
        "│",
        "2.000",
        "│",
        "0.500",
        "│",
    ] in rows  # waiting ranks are no part of it
    assert ["│", "1", "│", "-", "│"] in rows
