from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from math_verify import grader

from tlt_megatron.rewards import builtin
from tlt_megatron.rewards.builtin import score_exact, score_math

# By ground truth: boxed answers that are right, and such that are not.
FONTS = (
    "mathbf",
    "text",
    "textbf",
    "mathrm",
    "textit",
    "bm",
    "boldsymbol",
    "mbox",
    "underline",
    "bf",
    "textsc",
    "mathcal",
    "operatorname",
)
RIGHT = {
    "39": (*(rf"\{font}{{39}}" for font in FONTS), r"\mathbf{\text{39}}", r"\textbf{ 39.0 }", r"\mathbf{x=39}", r"\textcolor{red}{39}", r"\mathbf{39}\text{ cm}",
           r"\textcolor[rgb]{1,0,0}{39}", r"\color{red}39", r"{\color{red}{39}}", r"\colorbox{red}{39}", r"\fcolorbox{red}{blue}{39}", r"{\bf 39}", r"\large{39}",
           *(rf"\{font}{{39{space}{words}}}" for font, space, words in zip(("text", "textrm", "mathrm", "mbox", "textbf"), (" ", "~", r"\ ", r"\,", ""), ("apples", "cm", "cm", "km/h", "th"), strict=True)),
           r"\text{39 cm}^2", r"\text{39 }\text{cm}", r"39~\text{cm}", r"39^\circ", "39°", r"\text{39 degrees}", r"\mathbf{39\ \mathrm{cm}}", r"\textcolor{red}{39 cm}", r"\Large\textbf{39}", r"\scriptsize{39}",
           "39", "39.0", "+39", "(39)", r"39\text{ cm}", r"\$39", "x = 39", "22+17=39", "78/2"),
    "13": (r"\frac{26}{2}",),
    "-0.5": (r"-\frac{1}{2}",),
    "0.5": (r"\frac{1}{2}",),
    "1.5": (r"1\frac{1}{2}",),
    "3": ("x = 3",),
    "1000": ("1,000", r"\text{1,000 apples}"),
    "39°": ("39",),
    "300000": (r"3 \times 10^5",),
    "100000": ("10^5",),
    r"\{1,2\}": (r"\{2, 1\}",),
    "x^2+2x+1": ("(x+1)^2",),
    r"2\sqrt{2}": (r"\sqrt{8}",),  # the ground truth is no plain number, nor are the next ones
    r"\sqrt{8}": (r"2\sqrt{2}",),
    "22+17": ("22+17",),
    r"\frac{\pi}{2}": (r"\frac{2\pi}{4}",),
    r"\mathbf{42}": ("42",),
    r"\text{(A)}": (r"\text{(A)}",),
}  # fmt: skip
WRONG = {
    "39": (r"\mathbf{22+17}", r"\text{40}", r"\mathbf{3}9+1", "22+17", "22 + 17 + 0", "x = 22+17", "40-1", r"3 \cdot 13", "3*13", "|-39|", r"\text{40 apples}", r"\text{39 and 40}", r"\text{39 in 1999}", r"\text{Case 39}"),
    "0.5": (r"\frac{1}{3}", ""),
    "1024": ("2^{10}",),
    "13": (r"\frac{22+4}{2}", r"\sqrt{169}"),
    "120": ("5!",),
    r"\text{(A)}": (r"\text{(B)}",),
}  # fmt: skip
# Whole responses.
RESPONSES = [
    ("the answer is 1/2", r"\frac{1}{2}", 1.0),
    ("the answer is 0.5", r"\boxed{\frac12}", 1.0),
    (r"$\frac{2}{4}$", r"$\frac{1}{2}$", 1.0),
    (r"\boxed{7}, since 8 is too many", "7", 1.0),
    (r"\boxed{7}. My final answer is $8$.", "7", 1.0),
    ("first 3, then 4, so 72", "72", 1.0),
    ("", "0.5", 0.0),
    ("no idea", "0.5", 0.0),
    (r"\boxed{" + "(" * 50, "0.5", 0.0),
    (r"\boxed{8}, not 0.5", "0.5", 0.0),
    (r"\boxed{1} or \boxed{0.5}", "0.5", 0.0),
    (r"so \fbox{42}", "42", 1.0),
    (r"so \framebox[2cm]{42}", "42", 1.0),
    (r"so \boxed {42}", "42", 1.0),
    (r"so \boxed{{{42}}}", "42", 1.0),
    (r"so {\Large 42}", "42", 1.0),
    (r"The final answer is $\text{42 apples}$", "42", 1.0),
    (r"\boxed{\mathbf{\frac{\mathit{1}}{\mathbf{\text{2}}}}}", "0.5", 1.0),
    ("\\mathbf{" * 2000, "0.5", 0.0),
    (r"so \fbox{41}, not 42", "42", 0.0),
    (r"so $\mathbf{42}$", "42", 1.0),
    ("it is $22+17$", "39", 0.0),  # restates the question
    ("it is $22+17=39$", "39", 1.0),
    ("22+17", "39", 0.0),
    ("22+17=39", "39", 1.0),
]


@pytest.mark.parametrize(
    ("response", "ground_truth", "reward"),
    [
        *RESPONSES,
        *(
            (rf"so \boxed{{{answer}}}", truth, reward)
            for reward, table in ((1.0, RIGHT), (0.0, WRONG))
            for truth, answers in table.items()
            for answer in answers
        ),
    ],
)
def test_an_answer_must_be_equal_and_a_number_for_a_plain_number(
    response: str, ground_truth: str, reward: float
) -> None:
    assert score_math("", response, ground_truth) == reward


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


def test_an_answer_has_a_limit_of_cpu_time_so_a_busy_machine_changes_no_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert score_math("", "\\boxed{9^{9^{9^9}}}", "387420489") == 0.0
    compare = grader.sympy_expr_eq

    def compare_late(*words: Any) -> bool:
        time.sleep(6.0)  # as if other jobs ran
        return compare(*words)

    monkeypatch.setattr(grader, "sympy_expr_eq", compare_late)
    monkeypatch.setattr(builtin, "_CPU_S", 3.0)
    assert score_math("", "\\boxed{x+1}", "1+x") == 1.0


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
