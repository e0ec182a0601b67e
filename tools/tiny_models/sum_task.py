"""Sums of a few numbers, for a small language model: `python -m tools.tiny_models.sum_task --out
build/sum_task`.

Writes train.jsonl and eval.jsonl in slime's keys, for `reward.function: exact`, and right responses
in demonstrations.jsonl, for `algorithm.advantage: sft`. A reasoning model has imitated right
responses before RL begins: SmolLM2 as it is answers a long sum with babble. A prompt holds two
examples, since a small model does not follow a description:

    Add the numbers one by one. Then write #### and the sum.
    4 + 3
    4 + 3 = 7
    #### 7<|im_end|>
    ...
    2 + 9 + 5

The right response adds one number per line. Most sums have two or three numbers, and one in eight
has 12 to 40: lengths have a long tail, from 12 to 440 tokens. A held-out question is in no training
prompt; training questions may repeat, as there are only 81 sums of two digits. A prompt is text,
not chat messages: with SmolLM2's template it would be half as long again.
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

from tools.tiny_models.reasoning_task import ANSWER_MARK
from tools.tiny_models.task_rows import write_rows

Question = tuple[int, ...]  # the numbers to add
MAX_TERM = 9
_MIN_TERMS = 2
_MEAN_EXTRA_TERMS = 1.2  # beyond _MIN_TERMS, of an exponential distribution
_LONG_SHARE = 1 / 8  # share of questions with a number of terms in _LONG_TERMS
_LONG_TERMS = (12, 40)
_TASK = f"Add the numbers one by one. Then write {ANSWER_MARK} and the sum."
_EXAMPLES = ((4, 3), (5, 8, 6))
_END = "<|im_end|>"  # with which SmolLM2 ends a response


def question(terms: Question) -> str:
    """Return the sum as it is asked, such as "2 + 9 + 5"."""
    return " + ".join(map(str, terms))


def right_response(terms: Question) -> str:
    """Return a response with reward 1, without the token that ends it."""
    lines, total = [], terms[0]
    for term in terms[1:]:
        lines.append(f"{total} + {term} = {total + term}")
        total += term
    return "\n".join([*lines, f"{ANSWER_MARK} {total}"])


def prompt(terms: Question) -> str:
    """Return the task, its examples and the question."""
    shown = [f"{question(each)}\n{right_response(each)}{_END}" for each in _EXAMPLES]
    return "\n".join([_TASK, *shown, question(terms), ""])


def draw(rng: random.Random) -> Question:
    """Draw the numbers of one question, which is not an example of the prompt."""
    while True:
        if rng.random() < _LONG_SHARE:
            num_terms = rng.randint(*_LONG_TERMS)
        else:
            num_terms = _MIN_TERMS + int(rng.expovariate(1 / _MEAN_EXTRA_TERMS))
        terms = tuple(rng.randint(1, MAX_TERM) for _ in range(num_terms))
        if terms not in _EXAMPLES:
            return terms


def split_questions(
    num_train: int, num_eval: int, seed: int
) -> tuple[list[Question], list[Question]]:
    """Return questions to train on, and different held-out ones that are not among them."""
    rng = random.Random(seed)
    held_out: dict[Question, None] = {}
    while len(held_out) < num_eval:
        held_out[draw(rng)] = None
    train: list[Question] = []
    while len(train) < num_train:
        terms = draw(rng)
        if terms not in held_out:
            train.append(terms)
    return train, list(held_out)


def row(terms: Question) -> dict[str, str]:
    """Return a row for RL."""
    return {"prompt": prompt(terms), "label": str(sum(terms))}


def demonstrations(num: int, held_out: list[Question], seed: int) -> list[dict[str, str]]:
    """Return rows for supervised training, whose labels are right responses. No question of
    `held_out` is among them.
    """
    drawn = (draw(rng) for rng in itertools.repeat(random.Random(f"demonstrations-{seed}")))
    new = (terms for terms in drawn if terms not in held_out)
    shown = itertools.islice(new, num)
    return [{"prompt": prompt(terms), "label": right_response(terms)} for terms in shown]


def main(arguments: list[str] | None = None) -> None:
    """Write both files. No question is in both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/sum_task"))
    parser.add_argument("--train", type=int, default=512, help="number of questions")
    parser.add_argument("--eval", type=int, default=64)
    parser.add_argument("--demonstrations", type=int, default=640)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    train, held_out = split_questions(options.train, options.eval, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    shown = demonstrations(options.demonstrations, held_out, options.seed)
    write_rows(options.out / "train.jsonl", map(row, train))
    write_rows(options.out / "eval.jsonl", map(row, held_out))
    write_rows(options.out / "demonstrations.jsonl", shown)
    print(
        f"made {options.out}: {options.train} prompts to train on, {options.eval} held out,"
        f" {options.demonstrations} right responses"
    )


if __name__ == "__main__":
    main()
