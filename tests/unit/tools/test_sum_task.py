"""The sums for a small language model: right answers, a long tail, nothing held out is trained
on.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tlt_megatron.config.schema import DataSection
from tlt_megatron.rewards.builtin import score_exact
from tools.tiny_models import sum_task
from tools.tiny_models.sum_task import draw, prompt, right_response, split_questions


def test_a_right_response_adds_one_number_per_line_and_is_rewarded() -> None:
    response = right_response((2, 9, 5))
    assert response == "2 + 9 = 11\n11 + 5 = 16\n#### 16"
    assert score_exact("", response, "16") == 1.0
    assert score_exact("", response, "11") == 0.0
    assert score_exact("", "2 + 9 + 5 = 16", "16") == 0.0  # the form is part of the task
    assert score_exact("", f"{response}\n\n1 + 2\n1 + 2 = 3\n#### 3", "16") == 0.0  # ran on


def test_a_prompt_shows_examples_and_ends_with_the_question() -> None:
    assert prompt((2, 9, 5)).endswith("#### 19<|im_end|>\n2 + 9 + 5\n")


def test_most_sums_are_short_and_a_few_are_long() -> None:
    rng = random.Random(0)
    lengths = sorted(len(right_response(draw(rng))) for _ in range(1000))
    assert lengths[500] < 50  # characters
    assert lengths[-1] > 10 * lengths[500]


def test_held_out_questions_are_distinct_and_not_trained_on() -> None:
    train, held_out = split_questions(300, 50, seed=1)
    assert (len(train), len(set(held_out))) == (300, 50)
    assert not set(train) & set(held_out)
    assert split_questions(300, 50, seed=1) == (train, held_out)


def test_files_hold_the_keys_that_a_run_reads(tmp_path: Path) -> None:
    sum_task.main(["--out", str(tmp_path), "--train", "5", "--eval", "3", "--demonstrations", "9"])
    for name, count in (("train", 5), ("eval", 3)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        for row in rows:
            question = row[DataSection().input_key].splitlines()[-1]
            assert row["label"] == str(sum(map(int, question.split(" + "))))
    shown = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").open()]
    sums = [str(sum(map(int, row["prompt"].splitlines()[-1].split(" + ")))) for row in shown]
    assert [
        score_exact("", row["label"], right) for row, right in zip(shown, sums, strict=True)
    ] == [1.0] * 9


def test_no_held_out_question_is_shown() -> None:
    rng = random.Random("demonstrations-3")
    held_out = [draw(rng) for _ in range(40)]  # the first ones that would be shown
    shown = sum_task.demonstrations(40, held_out, seed=3)
    assert len(shown) == 40
    assert not {row["prompt"] for row in shown} & set(map(prompt, held_out))
