"""Two runs are told apart by a single token or reward, and the first step where they part is
named.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlt_megatron import cli
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


def record(folder: Path, row: object, reward: object = 1.0) -> str:
    """Write a run of one step with this row of its response's place and tokens."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "timing_s/step": 1.0}\n')
    text = json.dumps(row | {"reward": reward} if isinstance(row, dict) else row)
    (folder / "rollouts" / "step_0000001.rank_00000.jsonl").write_text(f"{text}\n")
    return str(folder)


GOOD = {"draw_index": 0, "sample_index": 0, "token_ids": [1, 2]}


def test_equal_differing_and_unreadable_runs_have_codes_of_their_own(tmp_path: Path) -> None:
    one, same = record(tmp_path / "one", GOOD), record(tmp_path / "same", GOOD)
    other = record(tmp_path / "other", GOOD, reward=0.0)
    assert [cli.main(["compare", one, each]) for each in (same, other)] == [0, 1]
    assert cli.main(["compare", one, str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    "row",
    [[], {}, GOOD | {"token_ids": 7}, GOOD | {"token_ids": None}, GOOD | {"draw_index": []}, "x"],
)
def test_a_broken_run_is_no_run_that_differs(
    tmp_path: Path, row: object, capsys: pytest.CaptureFixture[str]
) -> None:
    one, broken = record(tmp_path / "one", GOOD), record(tmp_path / "broken", row)
    assert cli.main(["compare", one, broken]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "broken/rollouts/step_0000001.rank_00000.jsonl" in line
