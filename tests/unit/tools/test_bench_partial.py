"""The figures of `python -m tools.bench partial`, by hand."""

from __future__ import annotations

from tools.bench.partial import summarize

ROWS = [
    {"step": 0, "eval/accuracy": 0.25},
    {"step": 1, "timing_s/step": 2.0, "timing_s/gen": 1.0},
    {"step": 2, "timing_s/step": 4.0, "timing_s/gen": 3.0, "rollout/policy_age/mean": 1.0},
    {"step": 2, "eval/accuracy": 0.75},
    {"step": 3, "timing_s/step": 3.0, "timing_s/gen": 2.0, "rollout/policy_age/mean": 0.5},
    {"step": 3, "eval/accuracy": 0.5},
]


def test_time_to_the_target_is_that_of_the_steps_before_the_first_evaluation_that_reaches_it() -> (
    None
):
    found = summarize(ROWS, 0.75)
    assert found["steps_to_target"] == 2
    assert found["seconds_to_target"] == 6.0
    assert found["step_s"] == 3.0
    assert found["gen_s"] == 2.0
    assert found["accuracy"] == 0.5
    assert found["policy_age"] == 0.5


def test_a_target_that_is_not_reached_has_no_time() -> None:
    assert summarize(ROWS, 0.9)["seconds_to_target"] is None
    assert summarize(ROWS, 0.2)["seconds_to_target"] == 0
