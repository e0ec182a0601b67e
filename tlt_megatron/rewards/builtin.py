"""The built-in reward functions: `math` (equal as mathematics, by math-verify) and `exact` (equal as text).

Loaded by `reward.load_reward`. A response that cannot be read, or whose comparison takes too long, scores 0: that
is the policy's doing. A ground truth that cannot be read is an error: that is the data set's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_TIMEOUT_S = 5  # of reading and of comparing, each; "9^{9^{9^9}}" is short and takes forever


def score_math(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
) -> float:
    """1.0 where the answer of the response equals the ground truth, else 0.0.

    The answer is what is boxed, else the last formula or number. `ground_truth` is LaTeX or plain, with or
    without \\boxed{} or $ signs.
    """
    # math-verify limits time by SIGALRM, which works in a main thread only; elsewhere the caller must
    in_main_thread = threading.current_thread() is threading.main_thread()
    timeout_s = _TIMEOUT_S if in_main_thread else None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns with the whole response
    is_boxed = "\\boxed" in ground_truth
    gold = parse(
        ground_truth if is_boxed else f"\\boxed{{{ground_truth}}}", parsing_timeout=timeout_s
    )
    if not gold or not ground_truth.strip():
        raise ValueError(f"ground_truth={ground_truth!r}: math-verify finds no answer in it")
    answer = parse(
        solution_str,
        [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=timeout_s,
    )
    return float(verify(gold, answer, timeout_seconds=timeout_s))


def score_exact(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
) -> float:
    """1.0 where the text after the last "####" (without one: the whole response) is the ground truth, else 0.0.

    White space around both is ignored. Example: "3 + 4 = 7\\n#### 7" has the answer "7".
    """
    return float(solution_str.rpartition("####")[2].strip() == ground_truth.strip())
