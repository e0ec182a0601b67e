"""What tests of the policy update share: scored responses, a packed micro-batch, a trainer over a
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.health import TrainingHealth
from tlt_megatron.policy.policy_trainer import PolicyTrainer
from tlt_megatron.runtime.process_groups import SINGLE, ProcessGroups, group_of
from tlt_megatron.types import FinishReason, MicroBatch, Prompt, Rollout, RolloutKey, ScoredGroup


def make_rollout(
    prompt_ids: tuple[int, ...], token_ids: Tensor, key: RolloutKey = (0, 0), **changes: Any
) -> Rollout:
    """A response that stopped, all log-probs 0, of the draw and sample `key`."""
    zeros = torch.zeros(token_ids.numel())
    fields: dict[str, Any] = {
        "prompt_id": str(key[0]),
        "draw_index": key[0],
        "sample_index": key[1],
        "prompt_ids": prompt_ids,
        "token_ids": token_ids,
        "logprobs": zeros,
        "policy_logprobs": zeros,
        "finish_reason": FinishReason.STOP,
        "versions": ((0, token_ids.numel()),),
    }
    return Rollout(**fields | changes)


def score(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> ScoredGroup:
    """The group of all `rollouts`."""
    first = rollouts[0]
    prompt = Prompt(
        prompt_id=first.prompt_id, draw_index=first.draw_index, token_ids=first.prompt_ids
    )
    return ScoredGroup(prompt=prompt, rollouts=tuple(rollouts), rewards=tuple(rewards))


def random_batch(
    seed: int, vocab_size: int, lengths: Sequence[Sequence[int]], rewards: Sequence[Sequence[float]]
) -> list[ScoredGroup]:
    """Random responses of `lengths` with random log-probs in (-5, 0], one group per row."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for i, (row, scores) in enumerate(zip(lengths, rewards, strict=True)):
        rollouts = []
        for g, length in enumerate(row):
            logprobs = -5 * torch.rand(2, length, generator=generator)
            tokens = torch.randint(0, vocab_size, (length,), generator=generator)
            known = {"logprobs": logprobs[0], "policy_logprobs": logprobs[1]}
            rollouts.append(make_rollout(tuple(range(2 + i)), tokens, (i, g), **known))
        batch.append(score(rollouts, scores))
    return batch


def data_parallel_groups() -> ProcessGroups:
    """The groups of forked ranks that are all data parallel."""
    everyone = group_of(dist.group.WORLD)
    return ProcessGroups(world=everyone, dp=everyone)


def make_trainer(
    model: Any, section: AlgorithmSection, groups: ProcessGroups | None = None, **settings: Any
) -> PolicyTrainer:
    """Its engines may differ by any log-probs, unless `settings` have another `health`."""
    health = TrainingHealth(max_diff=1e9, dtypes=("float32", "float32"))
    defaults = {"micro_batch_tokens": 20, "temperature": 1.0, "max_new_tokens": 32}
    groups = groups or ProcessGroups(world=SINGLE)
    return PolicyTrainer(
        model=model, section=section, groups=groups, **{"health": health} | defaults | settings
    )


def make_packed(mask: Sequence[float], **fields: Any) -> MicroBatch:
    """A micro-batch of one sequence whose old and rollout log-probs are -1, with the loss of
    `mask`.
    """
    size, mask_P = len(mask), torch.tensor(mask)
    defaults = {
        "token_ids": torch.zeros(size, dtype=torch.int64),
        "labels": torch.zeros(size, dtype=torch.int64),
        "position_ids": torch.arange(size),
        "cu_seqlens": torch.tensor([0, size], dtype=torch.int32),
        "loss_mask": mask_P,
        "loss_weights": mask_P,
        "advantages": torch.ones(size),
        "old_logprobs": torch.full((size,), -1.0),
        "rollout_logprobs": torch.full((size,), -1.0),
        "loss_count": int(sum(mask)),
    }
    return MicroBatch(**defaults | fields)
