"""A reward function of your own, in two variants. Point the configuration at one of them:

    reward:
      # or several with weights:
      # function: {math: 1.0, "examples/custom_reward.py:compute_score": 0.2}
      function: examples/custom_reward.py:compute_score     # or package.module:function
      num_workers: 4        # processes per rank
      timeout_s: 10.0       # for one response
      on_error: raise       # zero: a failure is a reward of 0, counted in the metrics

The function runs in worker processes, never in the trainer: it may be slow, use signals or start
programs. What it prints is in the logs of the run. Import what it needs at the top of its file, so
that a missing package is an error at start.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
) -> dict[str, float]:
    """1 for the right last number, 0.1 less without an <answer> tag around it, 0 for a wrong one.

    `data_source`, `ground_truth` and `extra_info` are the row's of the data set; `solution_str` is
    the response alone, without special tokens. Return a finite number, or a dict with "score". Its
    further numbers become metrics, here reward/<data source>/is_tagged/mean; text in it is skipped.
    """
    tagged = re.search(r"<answer>(.*?)</answer>", solution_str, flags=re.DOTALL)
    numbers = _NUMBER.findall(tagged.group(1) if tagged else solution_str)
    is_right = bool(numbers) and float(numbers[-1]) == float(ground_truth)
    score = (1.0 if tagged else 0.9) if is_right else 0.0
    return {"score": score, "is_tagged": float(tagged is not None)}


async def compute_score_async(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
) -> float:
    """The same judgement by a service. An async function scores many responses at once in each
    worker.
    """
    verdict = await _ask_judge(solution_str, ground_truth)
    return 1.0 if verdict == "right" else 0.0


async def _ask_judge(answer: str, reference: str) -> str:
    """Stands for a request to a verifier or a judge model, with a client of your choice."""
    await asyncio.sleep(0.01)
    numbers = _NUMBER.findall(answer)
    return "right" if numbers and numbers[-1] == reference else "wrong"
