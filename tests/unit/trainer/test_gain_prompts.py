"""The prompts that measure the gain of speculation are new ones."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.trainer.gain import measure_gain
from tlt_megatron.types import FinishReason, Prompt, Rollout, RolloutGroup, SamplingParams


class RecordingEngine:
    """Answers each prompt with its draw index. Notes what it is asked to do."""

    def __init__(self) -> None:
        self.is_on = True
        self.asked: list[tuple[bool, list[int]]] = []

    def pause_speculation(self, is_paused: bool) -> bool:
        self.is_on = not is_paused
        return True

    def generate(self, prompts: list[Prompt], *_: object, **__: object) -> list[RolloutGroup]:
        self.asked.append((self.is_on, [p.draw_index for p in prompts]))
        return [answer_of(prompt) for prompt in prompts]

    def take_passes(self) -> list[Any]:
        return []


def answer_of(prompt: Prompt) -> RolloutGroup:
    rollout = Rollout(
        prompt_id=prompt.prompt_id,
        draw_index=prompt.draw_index,
        sample_index=0,
        prompt_ids=prompt.token_ids,
        token_ids=torch.tensor([prompt.draw_index]),
        logprobs=torch.zeros(1),
        policy_logprobs=torch.zeros(1),
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )
    return RolloutGroup(prompt=prompt, rollouts=(rollout,))


def test_both_ways_generate_the_same_prompts_and_no_prompt_comes_back() -> None:
    """Each way also generates a batch that is not timed: the switch dropped its captured graphs."""
    engine, indices = RecordingEngine(), itertools.count(100)

    def draw(count: int) -> list[Prompt]:
        found = itertools.islice(indices, count)
        return [Prompt(prompt_id=str(i), draw_index=i, token_ids=(1,)) for i in found]

    alone = Group(handle=None, rank=0, size=1, global_ranks=(0,))
    params = SamplingParams(num_samples=1, max_new_tokens=1)
    gain = measure_gain(engine, [2, 1], draw, params, policy_version=3, replicas=alone)
    rounds = [[[100, 101], [102, 103], [104]], [[105, 106], [107, 108], [109]]]
    expected = [(is_on, each) for batches in rounds for is_on in (True, False) for each in batches]
    assert engine.asked == expected
    assert engine.is_on
    assert gain is not None
    assert gain.num_differing == 0
