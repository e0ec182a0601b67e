"""What partial rollouts need of other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tlt_megatron.config.policy_sections import AlgorithmSection

if TYPE_CHECKING:
    from tlt_megatron.config.schema import RolloutSection


def check_partial_rollouts(rollout: RolloutSection, algorithm: AlgorithmSection) -> None:
    """Raise ValueError for partial rollouts without a correction, or limits that cannot hold."""
    num_tokens = rollout.partial_rollout_tokens
    rollout.require(
        num_tokens < rollout.max_new_tokens,
        "partial_rollout_tokens",
        f"0 (off), or < rollout.max_new_tokens={rollout.max_new_tokens}",
    )
    rollout.require(
        not num_tokens or algorithm.tis_cap > 0 or algorithm.rollout_rs != "none",
        "partial_rollout_tokens",
        "0 without a correction for tokens of earlier policies: set algorithm.tis_cap=2"
        " (truncated importance sampling) or algorithm.rollout_rs=token (masked)",
    )
    rollout.require(
        not num_tokens or not rollout.environment,
        "partial_rollout_tokens",
        f"0 where rollout.environment={rollout.environment!r} (conversations are not cut)",
    )
    num_drawn, num_prompts = rollout.over_sampling_prompts, rollout.num_prompts
    rollout.require(
        not num_drawn or (num_tokens > 0 and num_drawn >= num_prompts),
        "over_sampling_prompts",
        f"0, or >= rollout.num_prompts={num_prompts} with rollout.partial_rollout_tokens > 0",
    )
