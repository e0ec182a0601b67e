"""An environment of your own: a calculator that the policy may use. Point the configuration at it:

    rollout:
      environment: examples/calculator.py:answer     # or package.module:function
      max_turns: 4                  # by the policy
      max_new_tokens: 256           # by the policy, in all turns together
      max_observation_tokens: 64    # by the environment, in all answers together
    reward:
      num_workers: 2                # processes per rank, which also answer

A turn of the policy ends with its stop token. A turn that ends with an expression and "=", as in
"so 12*3=", uses the calculator; any other turn ends the conversation. Answers run in worker
processes: they may be slow, and start programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

_CALL = re.compile(r"(\d{1,9})\s*([-+*/])\s*(\d{1,9})\s*=\s*$")


def answer(
    messages: Sequence[Mapping[str, object]],
    data_source: str,
    ground_truth: str,
    extra_info: Mapping[str, object],
) -> tuple[str, bool]:
    """Return the observation, and whether the conversation is done.

    `messages` is the conversation so far, and ends with the policy's turn. The other arguments are
    the row's of the data set. Instead of a text, which gets the role user, the observation may be a
    list of messages. Their further keys come back with the next turn, so they can hold a state: the
    function itself keeps nothing.
    """
    turn = str(messages[-1]["content"])
    if not turn.rstrip().endswith("="):
        return "", True
    return calculate(turn), False


async def answer_async(
    messages: Sequence[Mapping[str, object]],
    data_source: str,
    ground_truth: str,
    extra_info: Mapping[str, object],
) -> tuple[str, bool]:
    """The same for a tool behind a network: an async function answers many conversations at once in
    each worker.
    """
    return answer(messages, data_source, ground_truth, extra_info)


def calculate(text: str) -> str:
    """Return the value of the expression at the end of `text`: a whole number, a fraction as 1/3,
    or ?.
    """
    found = _CALL.search(text)
    if found is None:
        return "?"
    left, operator, right = Fraction(found[1]), found[2], Fraction(found[3])
    if operator == "/":
        return str(left / right) if right else "?"
    return str({"+": left + right, "-": left - right, "*": left * right}[operator])
