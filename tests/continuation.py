"""Responses that are cut and continued, against those that are generated in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tlt_megatron.types import FinishReason, Prompt, Rollout, RolloutGroup, SamplingParams

Generate = Callable[[Sequence[Prompt], SamplingParams], list[RolloutGroup]]


def continuation(prompt: Prompt, so_far: Rollout, limit: int) -> Prompt:
    """The prompt that continues a response, up to `limit` tokens more."""
    return replace(
        prompt,
        token_ids=(*prompt.token_ids, *so_far.token_ids.tolist()),
        first_sample=so_far.sample_index,
        first_position=so_far.token_ids.numel(),
        num_samples=1,
        max_new_tokens=limit,
    )


def check_continued(
    generate: Generate, prompts: Sequence[Prompt], params: SamplingParams, *, cut: int, atol: float
) -> None:
    """Responses that are cut after `cut` tokens and continued are equal to whole ones, also in one
    call with whole ones.
    """
    whole = generate(prompts, params)
    firsts = generate([replace(prompt, max_new_tokens=cut) for prompt in prompts], params)
    rest = params.max_new_tokens - cut
    begun = [
        (group, so_far)
        for group in firsts
        for so_far in group.rollouts
        if so_far.finish_reason is FinishReason.LENGTH
    ]
    continued = [continuation(group.prompt, so_far, rest) for group, so_far in begun]
    assert len(continued) > len(prompts) / 2
    fresh = replace(prompts[0], draw_index=10_000)
    groups = generate([fresh, *continued], params)
    assert len(groups[0].rollouts) == params.num_samples
    expected = {r.key: r for group in whole for r in group.rollouts}
    for (_, so_far), group in zip(begun, groups[1:], strict=True):
        (later,) = group.rollouts
        one = expected[later.key]
        assert torch.cat((so_far.token_ids, later.token_ids)).tolist() == one.token_ids.tolist()
        assert later.finish_reason is one.finish_reason
        for name in ("logprobs", "policy_logprobs"):
            joined = torch.cat((getattr(so_far, name), getattr(later, name)))
            torch.testing.assert_close(joined, getattr(one, name), rtol=0, atol=atol)
