"""Assigns rollouts to ranks and packs them into micro-batches, by lengths alone: the same on all
ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tlt_megatron.types import KeptTokens, MicroBatch, Rollout


def split_evenly(count: int, num_parts: int) -> list[range]:
    """Split range(count) into `num_parts` contiguous pieces whose sizes differ by at most one."""
    return [range(count * p // num_parts, count * (p + 1) // num_parts) for p in range(num_parts)]


def balance_by_size(
    sizes: Sequence[int], num_parts: int, last: Collection[int] = ()
) -> list[list[int]]:
    """Spread the indices of `sizes` over `num_parts` parts with nearly equal sums.

    Longest first, each to the lightest part. The largest sum is at most 4/3 of the optimum (Graham
    1969). A part may be empty. Indices within a part ascend. The indices `last` are spread after
    the others, so both the others and all indices are balanced.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for index in sorted(range(len(sizes)), key=lambda i: (i in last, -sizes[i], i)):
        lightest = loads.index(min(loads))
        parts[lightest].append(index)
        loads[lightest] += sizes[index]
    return [sorted(part) for part in parts]


def pack_by_tokens(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return few balanced packs of at most `max_tokens`. A longer sequence gets its own."""
    num_packs = max(1, -(-sum(sizes) // max_tokens)) if sizes else 0
    while True:
        packs = balance_by_size(sizes, num_packs)
        if all(len(pack) <= 1 or sum(sizes[i] for i in pack) <= max_tokens for pack in packs):
            return [pack for pack in packs if pack]
        num_packs += 1


def pack_rollouts(rollouts: Sequence[Rollout]) -> MicroBatch:
    """Pack whole sequences into one micro-batch, aligned as MicroBatch says.

    Loss fields are zero until `attach_targets` fills them for the update.
    """
    sequences = [
        torch.cat([torch.tensor(rollout.prompt_ids, dtype=torch.int64), rollout.token_ids])
        for rollout in rollouts
    ]
    zeros_P = torch.zeros(sum(rollout.num_tokens for rollout in rollouts))
    return MicroBatch(
        token_ids=torch.cat(sequences),
        labels=torch.cat([torch.cat([s[1:], s.new_zeros(1)]) for s in sequences]),
        position_ids=torch.cat([torch.arange(s.numel()) for s in sequences]),
        cu_seqlens=torch.tensor([0, *(s.numel() for s in sequences)]).cumsum(0).int(),
        loss_mask=_on_labels(rollouts, [_loss_mask(r) for r in rollouts]),
        loss_weights=zeros_P,
        advantages=zeros_P,
        old_logprobs=zeros_P,
        rollout_logprobs=_on_labels(rollouts, [r.logprobs for r in rollouts]),
        kept=_join_kept(rollouts),
    )


def _join_kept(rollouts: Sequence[Rollout]) -> KeptTokens | None:
    sets = [rollout.kept for rollout in rollouts if rollout.kept is not None]
    if not sets:
        return None
    counts = [
        torch.zeros(r.token_ids.numel()) if r.kept is None else r.kept.counts for r in rollouts
    ]
    return KeptTokens(
        token_ids=torch.cat([each.token_ids for each in sets]),
        counts=_on_labels(rollouts, counts).int(),
    )


def attach_targets(
    batch: MicroBatch,
    rollouts: Sequence[Rollout],
    *,
    advantages: Sequence[Tensor],
    old_logprobs: Sequence[Tensor] | None,
    ref_logprobs: Sequence[Tensor] | None,
    old_values: Sequence[Tensor] | None = None,
    returns: Sequence[Tensor] | None = None,
    aggregation: str,
    max_new_tokens: int,
) -> MicroBatch:
    """Fill the loss fields of a micro-batch packed from `rollouts`, from values [T] of each
    response.

    Weight of a token: token_mean 1, counted in tokens (DAPO, Yu et al. 2025, eq. 8); sequence_mean
    1/T, counted in sequences (GRPO, Shao et al. 2024, eq. 3); sequence_sum 1/max_new_tokens,
    counted in sequences (Dr. GRPO). T counts the policy's tokens; observations have weight 0.
    """
    lengths = [rollout.num_generated for rollout in rollouts]
    weights = {
        "token_mean": [1.0 for _ in lengths],
        "sequence_mean": [1.0 / length for length in lengths],
        "sequence_sum": [1.0 / max_new_tokens for _ in lengths],
    }[aggregation]

    def packed(values: Sequence[Tensor] | None) -> Tensor | None:
        return None if values is None else _on_labels(rollouts, values)

    weights_T = [weight * _loss_mask(r) for r, weight in zip(rollouts, weights, strict=True)]
    return dataclasses.replace(
        batch,
        loss_weights=_on_labels(rollouts, weights_T),
        advantages=_on_labels(rollouts, advantages),
        old_logprobs=packed(old_logprobs),
        ref_logprobs=packed(ref_logprobs),
        old_values=packed(old_values),
        returns=packed(returns),
        loss_count=count_loss(rollouts, aggregation),
    )


def count_loss(rollouts: Sequence[Rollout], aggregation: str) -> int:
    """Return the share of `rollouts` in the loss divisor: tokens for token_mean, else responses."""
    if aggregation == "token_mean":
        return sum(rollout.num_generated for rollout in rollouts)
    return len(rollouts)


def response_slices(rollouts: Sequence[Rollout]) -> list[slice]:
    """Return the slice of each response's predictions in the packed micro-batch of `rollouts`."""
    slices, start = [], 0
    for rollout in rollouts:
        first = start + len(rollout.prompt_ids) - 1
        slices.append(slice(first, first + rollout.token_ids.numel()))
        start += rollout.num_tokens
    return slices


def _loss_mask(rollout: Rollout) -> Tensor:
    """Return [T] float32, 1 on tokens of the policy."""
    mask = rollout.loss_mask
    return torch.ones(rollout.token_ids.numel()) if mask is None else mask.float()


def _on_labels(rollouts: Sequence[Rollout], values: Sequence[Tensor]) -> Tensor:
    """Put each value [T] of each response at the index that predicts its token; zero elsewhere."""
    packed_P = torch.zeros(sum(rollout.num_tokens for rollout in rollouts))
    for where, values_T in zip(response_slices(rollouts), values, strict=True):
        packed_P[where] = values_T
    return packed_P
