"""Turns ended rows into rollouts and rollout groups. Called by the embedded engine."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_megatron.engines.embedded.decode import Ended
from tlt_megatron.types import FinishReason, Prompt, Rollout, RolloutGroup, SamplingParams


def make_rollout(end: Ended, params: SamplingParams, policy_version: int) -> Rollout:
    """Return the rollout of one ended row."""
    prompt = end.request.state.prompt
    has_stopped = int(end.token_ids_T[-1]) in params.stop_token_ids
    return Rollout(
        prompt_id=prompt.prompt_id,
        draw_index=prompt.draw_index,
        sample_index=end.request.sample_index,
        prompt_ids=prompt.token_ids,
        token_ids=end.token_ids_T,
        logprobs=end.logprobs_T,
        policy_logprobs=end.policy_logprobs_T,
        finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        policy_version=policy_version,
        accept_lengths=tuple(end.request.accept_lengths),
    )


def group_rollouts(
    prompts: Sequence[Prompt], num_samples: int, rollouts: Sequence[Rollout | None]
) -> list[RolloutGroup]:
    """Return one group per prompt. `rollouts` holds `num_samples` consecutive entries for each prompt."""
    groups = []
    for number, prompt in enumerate(prompts):
        siblings = rollouts[number * num_samples : (number + 1) * num_samples]
        assert None not in siblings
        groups.append(RolloutGroup(prompt=prompt, rollouts=tuple(siblings)))
    return groups
