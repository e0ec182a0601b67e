"""Assigns rollouts to ranks and packs them into micro-batches. It uses only lengths, so all ranks get the same result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_megatron.types import Experience, MicroBatch, Rollout


def split_evenly(count: int, num_parts: int) -> list[range]:
    """Split range(count) into `num_parts` contiguous pieces whose sizes differ by at most one."""
    return [range(count * p // num_parts, count * (p + 1) // num_parts) for p in range(num_parts)]


def balance_by_tokens(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Spread the indices of `sizes` over `num_parts` parts with nearly equal sums: longest first, each to the lightest part.

    The largest sum is at most 4/3 of the optimum (Graham 1969). A part may be empty. Indices within a part ascend.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = loads.index(min(loads))
        parts[lightest].append(index)
        loads[lightest] += sizes[index]
    return [sorted(part) for part in parts]


def pack_by_tokens(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the fewest balanced packs found, of at most `max_tokens` each. A longer sequence gets its own pack."""
    num_packs = max(1, -(-sum(sizes) // max_tokens)) if sizes else 0
    while True:
        packs = balance_by_tokens(sizes, num_packs)
        if all(len(pack) <= 1 or sum(sizes[i] for i in pack) <= max_tokens for pack in packs):
            return [pack for pack in packs if pack]
        num_packs += 1


def pack_rollouts(rollouts: Sequence[Rollout]) -> MicroBatch:
    """Pack whole sequences into one micro-batch, with everything known before a forward pass. See MicroBatch for alignment.

    Loss fields are zero until `attach_experiences` fills them for the update.
    """
    tokens, labels, positions, mask, sampled = [], [], [], [], []
    for rollout in rollouts:
        sequence = torch.cat(
            [torch.tensor(rollout.prompt_ids, dtype=torch.int64), rollout.token_ids]
        )
        tokens.append(sequence)
        labels.append(torch.cat([sequence[1:], sequence.new_zeros(1)]))
        positions.append(torch.arange(sequence.numel()))
        mask.append(_on_labels(rollout, torch.ones(rollout.token_ids.numel())))
        sampled.append(_on_labels(rollout, rollout.logprobs))
    lengths = torch.tensor([0, *(sequence.numel() for sequence in tokens)])
    zeros_P = torch.zeros(int(lengths.sum()))
    return MicroBatch(
        token_ids=torch.cat(tokens),
        labels=torch.cat(labels),
        position_ids=torch.cat(positions),
        cu_seqlens=lengths.cumsum(0).int(),
        loss_mask=torch.cat(mask),
        loss_weights=zeros_P,
        advantages=zeros_P,
        old_logprobs=zeros_P,
        rollout_logprobs=torch.cat(sampled),
    )


def attach_experiences(
    batch: MicroBatch, experiences: Sequence[Experience], aggregation: str, max_new_tokens: int
) -> MicroBatch:
    """Fill the loss fields of a micro-batch packed from the rollouts of `experiences`, in the same order.

    Weight of a token: token_mean 1, counted in tokens (DAPO, Yu et al. 2025, eq. 8); sequence_mean 1/T, counted in sequences
    (GRPO, Shao et al. 2024, eq. 3); sequence_sum 1/max_new_tokens, counted in sequences (Dr. GRPO).
    """
    weights, count = [], 0
    for experience in experiences:
        length = experience.rollout.token_ids.numel()
        weight = {
            "token_mean": 1.0,
            "sequence_mean": 1.0 / length,
            "sequence_sum": 1.0 / max_new_tokens,
        }
        weights.append(_on_labels(experience.rollout, torch.full((length,), weight[aggregation])))
        count += length if aggregation == "token_mean" else 1
    return dataclasses.replace(
        batch,
        loss_weights=torch.cat(weights),
        advantages=_packed(experiences, [e.advantages for e in experiences]),
        old_logprobs=_packed_if_any(experiences, [e.old_logprobs for e in experiences]),
        ref_logprobs=_packed_if_any(experiences, [e.ref_logprobs for e in experiences]),
        loss_count=count,
    )


def response_slices(rollouts: Sequence[Rollout]) -> list[slice]:
    """Return the slice of each response's predictions in the packed micro-batch of `rollouts`."""
    slices, start = [], 0
    for rollout in rollouts:
        first = start + len(rollout.prompt_ids) - 1
        slices.append(slice(first, first + rollout.token_ids.numel()))
        start += rollout.num_tokens
    return slices


def _packed(experiences: Sequence[Experience], values: Sequence[Tensor]) -> Tensor:
    return torch.cat([_on_labels(e.rollout, v) for e, v in zip(experiences, values, strict=True)])


def _packed_if_any(
    experiences: Sequence[Experience], values: Sequence[Tensor | None]
) -> Tensor | None:
    known = [value for value in values if value is not None]
    return _packed(experiences, known) if len(known) == len(values) else None


def _on_labels(rollout: Rollout, values_T: Tensor) -> Tensor:
    """Spread response values [T] over the sequence: each at the index that predicts its token, zero elsewhere."""
    packed = values_T.new_zeros(rollout.num_tokens)
    first = len(rollout.prompt_ids) - 1
    packed[first : first + values_T.numel()] = values_T
    return packed
