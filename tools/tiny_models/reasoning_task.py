"""A synthetic reasoning task with answers that can be checked and response lengths with a long
tail.

A problem is (multiplier k, start n). While n > 1, an even n becomes n/2 and an odd n becomes k*n +
1. The answer is the number of odd steps. k=1 reaches 1 quickly (easy, short); k=3 is the Collatz
map (some starts take a hundred steps). The response writes every step, so each step is a small
local computation, and the answer needs all of them:

    prompt    3n+1;6=
    response  6/3*1:01/5*2:61/8/4/2/1####2

Numbers in the derivation have their LEAST significant digit first, the order of carries. "/" is a
halving, "*c:" the c-th odd step. The prompt's start and the answer are in the usual order. Used by
make_tiny_policy.py. `slip` adds an error as people make it; the policy is pre-trained on such
derivations, and RL removes the errors.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

MAX_START = 999
MAX_RESPONSE_TOKENS = 512  # in a right response, with the end-of-sequence token
ANSWER_MARK = "####"
SYMBOLS = (*"0123456789", *"n+;=*/:", ANSWER_MARK)
_SHORT_SHARE, _LONG_SHARE = 0.68, 0.20  # shares of prompts: k=1; k=3 with at least _LONG_TOKENS
_LONG_TOKENS = 360


class Slip(StrEnum):
    """A way to get one step wrong. Later steps continue correctly from the wrong value."""

    FORGOT_ONE = "forgot_one"  # k*n instead of k*n + 1
    DROPPED_CARRY = "dropped_carry"  # one carry between two digits is lost
    MISCOUNT = "miscount"  # an odd step is not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Asks how many odd steps `start` takes to 1 under n -> n/2 (even), multiplier * n + 1
    (odd).
    """

    multiplier: int  # 1 or 3
    start: int  # >= 3, not a power of two

    @property
    def prompt(self) -> str:
        return f"{self.multiplier}n+1;{self.start}="


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of a derivation: the value reached, and the odd steps counted so far."""

    value: int
    num_odd: int
    is_odd_step: bool


def derive(problem: Problem) -> list[Step]:
    """Return the right derivation, without the start."""
    return list(_continue(problem.multiplier, problem.start, 0))


def label(problem: Problem) -> str:
    """Return the right answer."""
    return str(derive(problem)[-1].num_odd)


def render(problem: Problem, steps: list[Step]) -> str:
    """Return the response: the start, the steps, and the answer of the last step."""
    parts = [str(problem.start)[::-1]]
    for step in steps:
        parts.append(f"*{step.num_odd}:" if step.is_odd_step else "/")
        parts.append(str(step.value)[::-1])
    return f"{''.join(parts)}{ANSWER_MARK}{steps[-1].num_odd}"


def slip(problem: Problem, rng: random.Random) -> tuple[list[Step], Slip]:
    """Return a derivation that goes wrong at one random step, and its kind of slip.

    It ends in a wrong answer that fits its length: slips that do not change the answer are drawn
    again.
    """
    right = derive(problem)
    while True:
        at = rng.randrange(len(right))
        kind = rng.choice(tuple(Slip))
        wrong = _slip_step(problem, right, at, kind, rng)
        if wrong is None:
            continue
        steps = [*right[:at], wrong, *_continue(problem.multiplier, wrong.value, wrong.num_odd)]
        is_wrong = steps[-1].num_odd != right[-1].num_odd
        if is_wrong and num_tokens(render(problem, steps)) < MAX_RESPONSE_TOKENS:
            return steps, kind


def num_tokens(response: str) -> int:
    """Return the tokens of a rendered response, including the end-of-sequence token."""
    return len(response.replace(ANSWER_MARK, "#")) + 1


def all_problems(multiplier: int) -> list[Problem]:
    """Return every problem of this multiplier whose right response fits. Powers of two have no odd
    step and are excluded.
    """
    starts = (start for start in range(3, MAX_START + 1) if start & (start - 1))
    problems = (Problem(multiplier=multiplier, start=start) for start in starts)
    return [p for p in problems if num_tokens(render(p, derive(p))) <= MAX_RESPONSE_TOKENS]


class ProblemSampler:
    """Draws problems. Most are short and a fixed share is long, so that one batch already has the
    tail.

    Starts of short problems are log-uniform, which keeps the median low.
    """

    def __init__(self, excluded: frozenset[Problem] = frozenset()) -> None:
        self._easy = [p for p in all_problems(1) if p not in excluded]
        hard = [p for p in all_problems(3) if p not in excluded]
        lengths = [num_tokens(render(p, derive(p))) for p in hard]
        self._long = [p for p, n in zip(hard, lengths, strict=True) if n >= _LONG_TOKENS]
        self._middle = [p for p, n in zip(hard, lengths, strict=True) if n < _LONG_TOKENS]
        self._easy_weights = [1 / p.start for p in self._easy]
        self._middle_weights = [1 / p.start for p in self._middle]

    def draw(self, rng: random.Random) -> Problem:
        """Draw one problem. Problems may repeat."""
        u = rng.random()
        if u < _SHORT_SHARE:
            return rng.choices(self._easy, self._easy_weights)[0]
        if u < 1 - _LONG_SHARE:
            return rng.choices(self._middle, self._middle_weights)[0]
        return rng.choice(self._long)

    def draw_distinct(self, count: int, rng: random.Random) -> list[Problem]:
        """Draw `count` different problems, in the order of their first draw."""
        drawn: dict[Problem, None] = {}
        while len(drawn) < count:
            drawn[self.draw(rng)] = None
        return list(drawn)


def _continue(multiplier: int, value: int, num_odd: int) -> Iterator[Step]:
    while value > 1:
        is_odd = value % 2 == 1
        value = multiplier * value + 1 if is_odd else value // 2
        num_odd += is_odd
        yield Step(value=value, num_odd=num_odd, is_odd_step=is_odd)


def _slip_step(
    problem: Problem, right: list[Step], at: int, kind: Slip, rng: random.Random
) -> Step | None:
    """Return step `at` of the derivation `right` with a slip of this kind; None if it is not
    possible.
    """
    step = right[at]
    before = right[at - 1].value if at else problem.start
    if kind is Slip.DROPPED_CARRY:
        candidates = _dropped_carries(before, problem.multiplier if step.is_odd_step else 0)
        return replace(step, value=rng.choice(candidates)) if candidates else None
    if not step.is_odd_step:
        return None
    if kind is Slip.MISCOUNT:
        return replace(step, num_odd=step.num_odd - 1) if step.num_odd > 1 else None
    return replace(step, value=step.value - 1)


def _dropped_carries(value: int, multiplier: int) -> list[int]:
    """Return the values of `multiplier * value + 1` (multiplier 0: value / 2) with one carry lost;
    no zeros.
    """
    digits = [int(c) for c in reversed(str(value))]
    results = []
    if multiplier:
        right, carry = multiplier * value + 1, 1
        for i, digit in enumerate(digits):
            carry = (multiplier * digit + carry) // 10
            if carry:
                results.append(right - carry * 10 ** (i + 1))
    else:
        results = [value // 2 - 5 * 10 ** (i - 1) for i, d in enumerate(digits) if i and d % 2]
    return [r for r in results if r > 0]
