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
    "response",
    [
        *("\\boxed{\\frac{1}{3}}", "", "no idea", "\\boxed{}", "\\boxed{8}, not 0.5"),
        *("\\boxed{1} or \\boxed{0.5}", "\\boxed{" + "(" * 50),
    ],
)
def test_unequal_as_mathematics(response: str) -> None:
    assert score_math("", response, "0.5") == 0.0


FONTS = ("mathbf", "text", "textbf", "mathrm", "textit", "bm", "boldsymbol", "mbox", "underline")
RIGHT = {
    "39": (
        *(f"\\{font}{{39}}" for font in FONTS),
        *(
            "\\mathbf{\\text{39}}",
            "\\textbf{ 39.0 }",
            "\\mathbf{x=39}",
            "\\textcolor{red}{39}",
            "\\mathbf{39}\\text{ cm}",
        ),
        *("39", "39.0", "+39", "(39)", "39\\text{ cm}", "\\$39", "x = 39", "22+17=39", "78/2"),
    ),
    "13": ("\\frac{26}{2}",),
    "-0.5": ("-\\frac{1}{2}",),
    "1.5": ("1\\frac{1}{2}",),
    "300000": ("3 \\times 10^5",),
    "100000": ("10^5",),
    "2\\sqrt{2}": ("\\sqrt{8}",),  # the ground truth is no plain number, nor are the next ones
    "22+17": ("22+17",),
    "\\frac{\\pi}{2}": ("\\frac{2\\pi}{4}",),
}
WRONG = {
    "39": (
        "\\mathbf{22+17}",
        "\\text{40}",
        "\\mathbf{3}9+1",
        "22+17",
        "22 + 17 + 0",
        "x = 22+17",
        "40-1",
        "3 \\cdot 13",
        "3*13",
        "|-39|",
    ),
    "1024": ("2^{10}",),
    "13": ("\\frac{22+4}{2}", "\\sqrt{169}"),
    "120": ("5!",),
}


@pytest.mark.parametrize(
    ("answer", "ground_truth", "reward"),
    [
        (answer, truth, reward)
        for reward, table in ((1.0, RIGHT), (0.0, WRONG))
        for truth, answers in table.items()
        for answer in answers
    ],
)
def test_answer_to_a_plain_number_must_be_a_number(
    answer: str, ground_truth: str, reward: float
) -> None:
    assert score_math("", f"so \\boxed{{{answer}}}", ground_truth) == reward


def test_a_box_of_text_mode_and_a_ground_truth_in_a_font() -> None:
    assert score_math("", "so \\fbox{42}", "42") == 1.0
    assert score_math("", "so \\fbox{41}, not 42", "42") == 0.0
    assert score_math("", "so \\boxed{42}", "\\mathbf{42}") == 1.0
    assert score_math("", "so \\boxed{\\text{(A)}}", "\\text{(A)}") == 1.0
    assert score_math("", "so \\boxed{\\text{(B)}}", "\\text{(A)}") == 0.0
    assert score_math("", "so $\\mathbf{42}$", "42") == 1.0


def test_restated_formula_outside_a_box_scores_nothing() -> None:
    assert score_math("", "it is $22+17$", "39") == 0.0
    assert score_math("", "it is $22+17=39$", "39") == 1.0
    assert score_math("", "22+17", "39") == 0.0
    assert score_math("", "22+17=39", "39") == 1.0


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
