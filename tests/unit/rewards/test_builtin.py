from __future__ import annotations

import threading

import pytest

from tlt_megatron.rewards.builtin import score_exact, score_math


@pytest.mark.parametrize(
    "response,ground_truth",
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5"),
        ("the answer is 1/2", "\\frac{1}{2}"),
        ("the answer is 0.5", "\\boxed{\\frac12}"),
        ("$\\frac{2}{4}$", "$\\frac{1}{2}$"),
        ("\\boxed{7}, since 8 is too many", "7"),
        ("\\boxed{7}. My final answer is $8$.", "7"),
        ("first 3, then 4, so 72", "72"),
        ("\\boxed{1,000}", "1000"),
        ("\\boxed{\\{2, 1\\}}", "\\{1,2\\}"),
        ("\\boxed{x = 3}", "3"),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}"),
        ("\\boxed{(x+1)^2}", "x^2+2x+1"),
    ],
)
def test_equal_as_mathematics(response: str, ground_truth: str) -> None:
    assert score_math("", response, ground_truth) == 1.0


@pytest.mark.parametrize(
    "response,ground_truth",
    [
        ("\\boxed{\\frac{1}{3}}", "0.5"),
        ("", "7"),
        ("no idea", "7"),
        ("\\boxed{}", "7"),
        ("\\boxed{8}, not 7", "7"),
        ("\\boxed{1} or \\boxed{2}", "2"),  # not both ways
        ("\\boxed{" + "(" * 50, "7"),
    ],
)
def test_unequal_as_mathematics(response: str, ground_truth: str) -> None:
    assert score_math("", response, ground_truth) == 0.0


@pytest.mark.parametrize("ground_truth", ["", "  "])
def test_ground_truth_without_an_answer_is_an_error(ground_truth: str) -> None:
    with pytest.raises(ValueError, match=r"ground_truth='\s*': math-verify finds no answer"):
        score_math("", "7", ground_truth)


def test_math_works_outside_a_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(score_math("", "\\boxed{0.5}", "1/2")))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize(
    "response,ground_truth,reward",
    [
        ("3 + 4 = 7\n#### 7\n", "7", 1.0),
        ("#### 6 no, #### 7", " 7 ", 1.0),
        (" 7\n", "7", 1.0),
        ("#### 7.0", "7", 0.0),
        ("it is 7", "7", 0.0),
        ("7 ####", "7", 0.0),
    ],
)
def test_exact_compares_what_follows_the_last_mark(
    response: str, ground_truth: str, reward: float
) -> None:
    assert score_exact("", response, ground_truth) == reward
