"""The synthetic task and its tiny policy: right derivations, slips that are wrong, tokenizer,
splits.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics

import pytest

from tlt_megatron.rewards.builtin import score_exact
from tools.tiny_models.make_tiny_policy import (
    Settings,
    derivation_rows,
    make_tokenizer,
    split_problems,
)
from tools.tiny_models.reasoning_task import (
    ANSWER_MARK,
    MAX_RESPONSE_TOKENS,
    Problem,
    ProblemSampler,
    Slip,
    all_problems,
    derive,
    label,
    num_tokens,
    render,
    slip,
)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return all_problems(1) + all_problems(3)


def _read_back(response: str) -> tuple[list[int], list[int], str]:
    """The values, the counts written at odd steps and the answer of a response."""
    body, _, answer = response.partition(ANSWER_MARK)
    values = [int(part[::-1]) for part in re.split(r"/|\*\d+:", body)]
    return values, [int(count) for count in re.findall(r"\*(\d+):", body)], answer


def next_value(multiplier: int, n: int) -> int:
    return multiplier * n + 1 if n % 2 else n // 2


def test_derivations_and_labels_equal_the_plain_definition(problems: list[Problem]) -> None:
    for problem in problems:
        response = render(problem, derive(problem))
        values, counts, answer = _read_back(response)
        num_odd = sum(value % 2 for value in values[:-1])
        assert (values[0], values[-1]) == (problem.start, 1)
        assert all(b == next_value(problem.multiplier, a) for a, b in itertools.pairwise(values))
        assert counts == list(range(1, num_odd + 1))
        assert answer == label(problem) == str(num_odd)
        assert num_tokens(response) <= MAX_RESPONSE_TOKENS


def test_a_slip_of_any_kind_breaks_one_step_and_is_wrong_by_the_reward(
    problems: list[Problem],
) -> None:
    rng = random.Random(0)
    kinds = []
    for problem in problems[::3]:
        steps, kind = slip(problem, rng)
        kinds.append(kind)
        response = render(problem, steps)
        assert score_exact("", response, label(problem)) == 0.0
        assert num_tokens(response) <= MAX_RESPONSE_TOKENS
        values, counts, _ = _read_back(response)
        assert values[-1] == 1
        pairs = list(itertools.pairwise(values))
        broken = sum(after != next_value(problem.multiplier, before) for before, after in pairs)
        is_miscounted = bool(counts) and counts[-1] != sum(before % 2 for before, _ in pairs)
        assert broken + is_miscounted == 1
    assert {kind: kinds.count(kind) > len(kinds) / 10 for kind in Slip} == dict.fromkeys(Slip, True)


@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_have_a_long_tail_within_a_batch(seed: int) -> None:
    sampler, rng = ProblemSampler(), random.Random(seed)
    ratios, medians = [], []
    for _ in range(40):
        lengths = [num_tokens(render(p, derive(p))) for p in (sampler.draw(rng) for _ in range(16))]
        medians.append(statistics.median(lengths))
        ratios.append(max(lengths) / medians[-1])
    assert statistics.median(medians) <= 70
    assert statistics.median(ratios) >= 8


def test_derivations_slip_at_the_asked_rate_and_leave_out_held_out_problems() -> None:
    assert len(make_tokenizer()) % 8 == 0
    train, held_out = split_problems(seed=0)
    assert not set(train) & set(held_out)
    rows = derivation_rows(Settings(slip_share=0.25, derivations=512), held_out)
    assert len(rows) == 512
    num_right = 0
    for row in rows:
        multiplier, start = re.fullmatch(r"(\d)n\+1;(\d+)=", row["prompt"]).groups()
        problem = Problem(multiplier=int(multiplier), start=int(start))
        num_right += row["label"] == render(problem, derive(problem))
        assert problem not in held_out
    # 512 draws: 4 standard deviations are 0.077, a false alarm in 16,000 seeds
    assert num_right / len(rows) == pytest.approx(0.75, abs=0.08)
