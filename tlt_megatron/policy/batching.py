"""Assigns rollouts to ranks and packs them into micro-batches, by lengths alone: the same on all
ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.runtime.memory_claim import STEP_PHASES, MemoryClaim, Phase
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.types import (
    CriticTargets,
    FinishReason,
    KeptTokens,
    MicroBatch,
    Rollout,
    RolloutKey,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One micro-batch of this rank and the rollouts in it, in packed order."""

    rollouts: tuple[Rollout, ...]
    batch: MicroBatch

    @property
    def keys(self) -> list[RolloutKey]:
        """Return the key of each rollout."""
        return [rollout.key for rollout in self.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """This rank's share of the responses of one optimizer step."""

    packs: tuple[Pack, ...]  # the update's micro-batches
    skipped: tuple[Rollout, ...]  # no gradient: no pass in the update
    skipped_count: int  # share of all ranks' skipped responses in the loss divisor


def find_owners(
    rollouts: Sequence[Rollout], skipped: Collection[RolloutKey], dp: Group
) -> dict[RolloutKey, int]:
    """Return the data-parallel index that computes each response of a mini-batch.

    Both the responses that are computed and those that are skipped are balanced.
    """
    last = {i for i, rollout in enumerate(rollouts) if rollout.key in skipped}
    shares = balance_by_size([r.num_tokens for r in rollouts], dp.size, last)
    return {rollouts[i].key: index for index, share in enumerate(shares) for i in share}


def make_minibatch(
    rollouts: Sequence[Rollout],
    skipped: Collection[RolloutKey],
    owners: Mapping[RolloutKey, int],
    dp: Group,
    section: AlgorithmSection,
    max_tokens: int,
) -> Minibatch:
    """Return this rank's share of a mini-batch, packed."""
    mine = [rollout for rollout in rollouts if owners[rollout.key] == dp.rank]
    return Minibatch(
        packs=pack_share([r for r in mine if r.key not in skipped], max_tokens),
        skipped=tuple(r for r in mine if r.key in skipped),
        skipped_count=count_loss([r for r in rollouts if r.key in skipped], section),
    )


def pack_share(rollouts: Sequence[Rollout], max_tokens: int) -> tuple[Pack, ...]:
    """Pack rollouts into micro-batches of at most `max_tokens`, as `pack_by_tokens` does."""
    packs = []
    for indices in pack_by_tokens([r.num_tokens for r in rollouts], max_tokens):
        chosen = tuple(rollouts[i] for i in indices)
        packs.append(Pack(rollouts=chosen, batch=pack_rollouts(chosen)))
    return tuple(packs)


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
    num_long = sum(2 * size > max_tokens for size in sizes)  # no two of them share a pack
    num_packs = max(1, -(-sum(sizes) // max_tokens), num_long) if sizes else 0
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
    kept = join_kept(rollouts)
    if kept is not None:
        counts = kept.counts.split([rollout.token_ids.numel() for rollout in rollouts])
        kept = dataclasses.replace(kept, counts=_on_labels(rollouts, counts).int())
    return MicroBatch(
        token_ids=torch.cat(sequences),
        labels=torch.cat([torch.cat([s[1:], s.new_zeros(1)]) for s in sequences]),
        position_ids=torch.cat([torch.arange(s.numel()) for s in sequences]),
        cu_seqlens=torch.tensor([0, *(s.numel() for s in sequences)]).cumsum(0).int(),
        loss_mask=_on_labels(rollouts, [_loss_mask(r) for r in rollouts]),
        loss_weights=zeros_P,
        advantages=zeros_P,
        old_logprobs=None,
        rollout_logprobs=_on_labels(rollouts, [r.logprobs for r in rollouts]),
        kept=kept,
        routes=_join_routes(rollouts),
        requests=tuple(rollout.key for rollout in rollouts),
    )


def _join_routes(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Return the routes [P, L, K], where the last token of each sequence has none."""
    sets = [rollout.routes for rollout in rollouts if rollout.routes is not None]
    if not sets:
        return None
    parts = []
    for rollout in rollouts:
        routes = sets[0][:0] if rollout.routes is None else rollout.routes
        num_absent = rollout.num_tokens - len(routes)
        parts += [routes, routes.new_full((num_absent, *routes.shape[1:]), -1)]
    return torch.cat(parts)


def attach_targets(
    pack: Pack,
    targets: Mapping[str, Mapping[RolloutKey, Tensor] | None],
    section: AlgorithmSection,
    max_new_tokens: int,
) -> MicroBatch:
    """Return the micro-batch of `pack` with its loss fields, from values [T] of each response.

    `targets` has the values by name of the field, also of `CriticTargets`. Weight of a token:
    token_mean 1, counted in tokens (DAPO, Yu et al. 2025, eq. 8); sequence_mean 1/T, counted in
    sequences (GRPO, Shao et al. 2024, eq. 3); sequence_sum 1/max_new_tokens, counted in sequences
    (Dr. GRPO). T counts the policy's tokens; observations have weight 0. So have masked responses,
    which are not counted.
    """
    divisors = {"token_mean": 1, "sequence_sum": max_new_tokens}
    weights = [
        _loss_mask(rollout)
        / divisors.get(section.aggregation, rollout.num_generated)
        * (not is_masked(rollout, section))
        for rollout in pack.rollouts
    ]
    fields = {
        name: _on_labels(pack.rollouts, [values[key] for key in pack.keys])
        for name, values in targets.items()
        if values is not None
    }
    critic = [fields.pop(name) for name in CriticTargets._fields if name in fields]
    return dataclasses.replace(
        pack.batch,
        critic=CriticTargets(*critic) if critic else None,
        loss_weights=_on_labels(pack.rollouts, weights),
        loss_count=count_loss(pack.rollouts, section),
        **fields,
    )


def is_masked(rollout: Rollout, section: AlgorithmSection) -> bool:
    """Return whether a response has no part in the loss (`algorithm.mask_truncated`)."""
    return section.mask_truncated and rollout.finish_reason is FinishReason.LENGTH


def count_loss(rollouts: Sequence[Rollout], section: AlgorithmSection) -> int:
    """Return the share of `rollouts` in the loss divisor: tokens for token_mean, else responses."""
    rollouts = [rollout for rollout in rollouts if not is_masked(rollout, section)]
    if section.aggregation == "token_mean":
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


def by_key(packs: Sequence[Pack], values: Sequence[Tensor]) -> dict[RolloutKey, Tensor]:
    """Return response values [T] by rollout, from the packed predictions [P] of each pack."""
    return {
        key: values_P[where].clone()
        for pack, values_P in zip(packs, values, strict=True)
        for key, where in zip(pack.keys, response_slices(pack.rollouts), strict=True)
    }


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


def join_kept(parts: Sequence[Rollout]) -> KeptTokens | None:
    """Return the kept sets of all parts. A part without any counts as the whole vocabulary."""
    sets = [part.kept for part in parts if part.kept is not None]
    if not sets:
        return None
    counts = [
        torch.zeros_like(part.token_ids).int() if part.kept is None else part.kept.counts
        for part in parts
    ]
    return KeptTokens(
        token_ids=torch.cat([each.token_ids for each in sets]), counts=torch.cat(counts)
    )


# ---- memory


# Of a token of a response: its id, two log-probs, its loss mask, and its share of a pass's numbers.
_TOKEN_BYTES = 32
# A rank sends its tokens in rounds of this many bytes, or of one response: with routes, a batch of
# long responses has gigabytes. A round takes at most 4 times as much (measured on 2 CPU ranks).
ROUND_BYTES = 64 << 20


def batch_claims(
    *,
    num_generated: int,
    num_own: int,
    num_copies: int,
    longest: int,
    route_bytes: int,
    has_critic: bool,
    is_cuda: bool,
    lower: str,
) -> list[MemoryClaim]:
    """Return the host memory of a batch on one rank, if all responses have `longest` tokens with
    their prompts.

    `num_generated` responses of the rank's engine stay until the step ends, and `num_own` come for
    its share. Each goes to `num_copies` ranks, 0 if there is one rank. `route_bytes` are those of a
    token, 0 if none are recorded. Packs copy the routes.
    """
    # Of a token: rewards and advantages. With a critic also values, returns, and padded copies.
    numbers_bytes = 56 if has_critic else 24
    sent = num_copies * longest * (_TOKEN_BYTES + route_bytes)  # for one response
    update = {Phase.UPDATE}
    held = [
        ("tokens of responses", num_generated * longest * _TOKEN_BYTES, STEP_PHASES, False),
        ("tokens of the update", num_own * longest * _TOKEN_BYTES, update, False),
        ("routes of responses", num_generated * longest * route_bytes, STEP_PHASES, False),
        ("routes of the update", 2 * num_own * longest * route_bytes, update, False),
        ("exchange of tokens", 4 * min(num_generated * sent, max(ROUND_BYTES, sent)), update, True),
        ("advantages", num_own * longest * numbers_bytes, update, False),
    ]
    return [
        MemoryClaim(name, num_bytes, phases, in_host=is_cuda, lower=lower, is_estimate=is_estimate)
        for name, num_bytes, phases, is_estimate in held
    ]
