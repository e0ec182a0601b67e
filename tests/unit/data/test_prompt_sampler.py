from __future__ import annotations

import dataclasses
import json

import pytest

from tlt_megatron.data.prompts import PromptSampler, PromptSet
from tlt_megatron.types import Prompt


def make_set(name: str = "train") -> PromptSet:
    rows = tuple(Prompt(prompt_id=f"{name}:{i}", draw_index=i, token_ids=(i,)) for i in range(10))
    return PromptSet(path=f"{name}.jsonl", rows=rows, fingerprint=f"of-{name}")


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def test_epochs_hold_each_prompt_once_whatever_the_batches() -> None:
    sampler = PromptSampler(make_set(), shuffle=True, seed=4)
    drawn = [prompt for size in (3, 4, 7, 1, 10, 25) for prompt in sampler.next_batch(size)]
    assert [prompt.draw_index for prompt in drawn] == list(range(50))
    assert all(len(set(ids(drawn[start : start + 10]))) == 10 for start in range(0, 50, 10))
    assert sampler.epoch == 5
    assert PromptSampler(make_set(), shuffle=True, seed=4).next_batch(50) == drawn


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = set()
    for seed in range(3):
        drawn = PromptSampler(make_set(), shuffle=True, seed=seed).next_batch(30)
        orders |= {tuple(ids(drawn[start : start + 10])) for start in (0, 10, 20)}
    assert len(orders) == 9  # false alarm: 36 pairs / 10!, one in 100,000


def test_order_is_the_same_on_every_machine() -> None:
    drawn = PromptSampler(make_set(), shuffle=True, seed=0).next_batch(10)
    # by hand: random.Random("0/0"), ten values of random(), their places from the smallest on
    assert [prompt.token_ids[0] for prompt in drawn] == [8, 9, 0, 3, 7, 4, 1, 5, 2, 6]


def test_without_shuffle_prompts_come_in_file_order() -> None:
    sampler = PromptSampler(make_set(), shuffle=False, seed=0)
    assert [p.token_ids[0] for p in sampler.next_batch(23)] == [*range(10), *range(10), 0, 1, 2]


@pytest.mark.parametrize("num_before", [0, 7, 10, 23])
def test_resume_equals_straight_run(num_before: int) -> None:
    """A state also resets a sampler that has drawn further."""
    straight, resumed = (PromptSampler(make_set(), shuffle=True, seed=1) for _ in range(2))
    resumed.next_batch(15)
    straight.next_batch(num_before)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.next_batch(30) == straight.next_batch(30)
    assert resumed.state_dict() == straight.state_dict()


def test_a_refused_state_names_both_data_sets_and_all_that_must_be_the_same() -> None:
    """An older version has no parts. tests/e2e/test_template_arguments.py has a newer one."""
    state = PromptSampler(make_set(name="old"), shuffle=True, seed=1).state_dict()
    del state["parts"]
    now = dataclasses.replace(make_set(name="new"), parts={"the rows": "a", "the tokenizer": "b"})
    names = r"old\.jsonl.*of-old.*new\.jsonl.*of-new.*: the rows, the tokenizer must be the same$"
    with pytest.raises(ValueError, match=names):
        PromptSampler(now, shuffle=True, seed=1).load_state_dict(state)
