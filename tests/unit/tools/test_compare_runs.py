"""Two runs are told apart by a single token or reward, and the first step where they part is
named.
"""

from __future__ import annotations

from tools.commands.compare_runs import Run, StepRecord, compare


def make_run(*tokens: int, reward: float = 1.0, grad_norm: float = 0.5) -> Run:
    """Step s draws one response, `tokens[s - 1]`, and another one that is always the same."""
    return {
        step: StepRecord(
            metrics={"actor/grad_norm": grad_norm},
            responses={(0, 0): ((7, token), reward), (0, 1): ((8,), 0.0)},
        )
        for step, token in enumerate(tokens, start=1)
    }


def test_equal_runs_are_identical() -> None:
    lines, is_same = compare(make_run(1, 2, 3), make_run(1, 2, 3, grad_norm=0.75))
    assert is_same
    assert lines == [
        "steps compared: 3 (of 3 and 3)",
        "responses: 6, tokens: 9",
        "tokens and rewards: identical",
        "actor/grad_norm: largest difference 0.25",
    ]


def test_one_token_is_found() -> None:
    lines, is_same = compare(make_run(1, 2, 3, 4), make_run(1, 5, 6))
    assert not is_same
    assert lines[0] == "steps compared: 3 (of 4 and 3)"
    assert "differ in 2 steps, first in step 2 (1 of 2 responses" in lines[2]


def test_one_reward_is_found() -> None:
    assert not compare(make_run(1), make_run(1, reward=0.0))[1]
