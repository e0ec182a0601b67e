"""The built-in reward functions: `math` (equal as mathematics, by math-verify) and `exact` (equal
as text).

Reward workers load them. If a response cannot be parsed or compared in time, it scores 0:
the policy wrote it. If a ground truth cannot be parsed, it is an error in the data set.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

from tlt_megatron.rewards.latex import without_fonts

_CPU_S = 5.0  # for parsing and for comparing, each; "9^{9^{9^9}}" never ends


def score_math(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
) -> float:
    """Return 1.0 if the answer of the response equals the ground truth, else 0.0.

    The answer is the boxed text, else the last formula or number. `ground_truth` is LaTeX or plain,
    with or without \\boxed{} or $ signs. If it is a plain number, the answer must also be written
    as a number: 39, 39.0, 78/2, 3.9 \\times 10^1, 3900\\% or x = 39. So \\boxed{22+17}, which only
    repeats the question, scores 0 for 39.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warnings hold the whole response
    solution_str, ground_truth = without_fonts(solution_str), without_fonts(ground_truth)
    is_boxed = "\\boxed" in ground_truth
    with _limited():
        gold = parse(ground_truth if is_boxed else f"\\boxed{{{ground_truth}}}", parsing_timeout=0)
    if not gold or not ground_truth.strip():
        raise ValueError(f"ground_truth={ground_truth!r}: math-verify finds no answer in it")
    with _limited():
        answer = parse(
            solution_str,
            [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
            parsing_timeout=0,
        )
    if isinstance(gold[0], sympy.Number) and answer and not _is_written_number(answer[0]):
        return 0.0
    with _limited():
        return float(verify(gold, answer, timeout_seconds=0))


@contextmanager
def _limited() -> Iterator[None]:
    """Let math-verify's calls time out after `_CPU_S` of CPU time.

    Its own limit is of the clock, so that another job of the machine could change a reward. Signals
    need the main thread. Elsewhere the caller limits the time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TimeoutException  # which math-verify handles

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_S, _CPU_S)  # again for the next comparison
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def score_exact(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
) -> float:
    """Return 1.0 if the text after the last "####" (or the whole response without one) is the
    ground truth, else 0.0.

    White space around both is ignored. Example: "3 + 4 = 7\\n#### 7" has the answer "7".
    """
    return float(solution_str.rpartition("####")[2].strip() == ground_truth.strip())


def _is_written_number(answer: object) -> bool:
    """Return whether an answer is written as a number. math-verify keeps sums, powers and roots as
    they are written.
    """
    if isinstance(answer, sympy.Equality):
        answer = answer.rhs
    while isinstance(answer, sympy.FiniteSet) and len(answer) == 1:
        (answer,) = answer.args
    if not isinstance(answer, sympy.Basic):
        return True  # text, which is compared as text
    parts = answer.args if isinstance(answer, sympy.Mul) else (answer,)
    factors = [part for part in parts if part != -1]
    num_plain = sum(isinstance(part, sympy.Number) for part in factors)
    return num_plain <= 1 and all(map(_is_number_factor, factors)) and len(factors) <= 2


def _is_number_factor(part: sympy.Basic) -> bool:
    """Return whether `part` is a number, one over a number, a power of ten, or a percent sign."""
    if isinstance(part, sympy.Pow):
        base, exponent = part.args
        return isinstance(base, sympy.Number) and (
            exponent == -1 or (base == 10 and isinstance(exponent, sympy.Integer))
        )
    return isinstance(part, sympy.Number) or part == sympy.UnevaluatedExpr(sympy.Rational(1, 100))
