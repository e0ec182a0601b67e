"""Sends the tokens of a batch from the ranks that generated them to those that train on them.

All ranks know the row of every response: its length, reward and finish reason. That is enough to
plan the batch. Tokens and log-probs travel once, as tensors, and only to their owners: the ranks of
one data-parallel index.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from tlt_megatron.policy.batching import ROUND_BYTES
from tlt_megatron.runtime.collectives import (
    exchange_bytes,
    gather_bytes,
    gather_json,
    gather_tensor,
    sum_tensor,
)
from tlt_megatron.runtime.process_groups import Group, ProcessGroups
from tlt_megatron.types import (
    FinishReason,
    KeptTokens,
    Rollout,
    RolloutKey,
    ScoredGroup,
    ScoredResponse,
    Transcript,
    TurnCredit,
)

_Fields = dict[str, Any]  # fields of `Rollout` by name
_TENSORS = ("token_ids", "logprobs", "policy_logprobs", "loss_mask", "routes")

# ---- rows


class ResponseRow(NamedTuple):
    """A response as all ranks know it, about 60 bytes of JSON, and up to 30 of each turn."""

    draw_index: int
    sample_index: int
    num_tokens: int
    num_observed: int  # tokens that the policy did not draw
    finish_reason: str
    versions: Sequence[Sequence[int]]
    reward: float
    details: dict[str, float]
    turns: Sequence[tuple[int, float]] = ()
    num_replaced: int = 0


def row_of(part: ScoredResponse) -> ResponseRow:
    rollout = part.rollout
    num_tokens = rollout.token_ids.numel()
    return ResponseRow(
        draw_index=rollout.draw_index,
        sample_index=rollout.sample_index,
        num_tokens=num_tokens,
        num_observed=num_tokens - rollout.num_generated,
        finish_reason=str(rollout.finish_reason),
        versions=rollout.versions,
        reward=part.reward,
        details=dict(part.details),
        turns=rollout.turns,
        num_replaced=rollout.num_replaced,
    )


def part_of(row: ResponseRow) -> ScoredResponse:
    """Return a response without its tokens, which another rank has."""
    absent_T = torch.empty(row.num_tokens, device="meta")
    rollout = Rollout(
        prompt_id="",  # it follows from the prompt, and so do its tokens
        draw_index=row.draw_index,
        sample_index=row.sample_index,
        prompt_ids=(),
        token_ids=absent_T.long(),
        logprobs=absent_T,
        policy_logprobs=absent_T,
        finish_reason=FinishReason(row.finish_reason),
        versions=tuple((version, count) for version, count in row.versions),
        num_observed=row.num_observed,
        turns=tuple(TurnCredit(*turn) for turn in row.turns),
        num_replaced=row.num_replaced,
    )
    return ScoredResponse(rollout, row.reward, row.details)


def _without_tokens(rollout: Rollout) -> Rollout:
    """Return what other ranks know of a response whose tokens leave this rank."""
    outline = part_of(row_of(ScoredResponse(rollout, 0.0, {}))).rollout
    return dataclasses.replace(outline, prompt_id=rollout.prompt_id, prompt_ids=rollout.prompt_ids)


# ---- tokens


def _name(key: RolloutKey) -> str:
    return f"{key[0]}.{key[1]}"


def _key(name: str) -> RolloutKey:
    draw, sample = name.split(".")
    return int(draw), int(sample)


def _tensors_of(rollout: Rollout) -> dict[str, Tensor]:
    found = {field: getattr(rollout, field) for field in _TENSORS}
    found["passes"] = torch.tensor(rollout.passes).int()
    if rollout.kept is not None:
        found |= {"kept_ids": rollout.kept.token_ids, "kept_counts": rollout.kept.counts}
    found["token_ids"] = rollout.token_ids.int()
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def to_bytes(rollouts: Sequence[Rollout]) -> bytes:
    """Return the tokens of `rollouts` and what belongs to them, b"" for none. `from_bytes` reads
    it.
    """
    tensors: dict[str, Tensor] = {}
    transcripts = {}
    for rollout in rollouts:
        name = _name(rollout.key)
        # Copies: both kinds of log-probs may be one tensor, which `save` refuses.
        tensors |= {f"{name}.{k}": v.clone() for k, v in _tensors_of(rollout).items()}
        if rollout.transcript is not None:
            transcripts[name] = dataclasses.asdict(rollout.transcript)
    return save(tensors, {"transcripts": json.dumps(transcripts)}) if tensors else b""


def from_bytes(data: bytes) -> dict[RolloutKey, _Fields]:
    """Return by response the fields of `Rollout` that `to_bytes` wrote."""
    fields: dict[RolloutKey, _Fields] = {}
    if not data:
        return fields
    for name, tensor in load(data).items():
        response, _, field = name.rpartition(".")
        fields.setdefault(_key(response), {})[field] = tensor
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])["__metadata__"]
    for name, transcript in json.loads(about["transcripts"]).items():
        lists = {key: tuple(transcript[key]) for key in ("messages", "turn_rewards")}
        fields[_key(name)]["transcript"] = Transcript(**{**transcript, **lists})
    for each in fields.values():
        each["token_ids"] = each["token_ids"].long()
        each["passes"] = tuple(map(tuple, each["passes"].tolist()))
        if "kept_ids" in each:
            ids, counts = each.pop("kept_ids"), each.pop("kept_counts")
            each["kept"] = KeptTokens(token_ids=ids, counts=counts)
        each["num_observed"] = 0
    return fields


def _send(own: Sequence[tuple[Rollout, Sequence[int]]], group: Group) -> dict[RolloutKey, _Fields]:
    """Send the tokens of each response to members of the group, in rounds of few bytes. Return
    what came. A collective.
    """
    sizes = [len(to) * t.nbytes for rollout, to in own for t in _tensors_of(rollout).values()]
    most = int(gather_tensor(torch.tensor([sum(sizes)]), group).max())
    num_rounds = 1 + most // ROUND_BYTES
    fields: dict[RolloutKey, _Fields] = {}
    for start in range(num_rounds):
        outgoing: list[list[Rollout]] = [[] for _ in range(group.size)]
        for rollout, members in own[start::num_rounds]:
            for member in members:
                outgoing[member].append(rollout)
        outgoing[group.rank] = []
        for data in exchange_bytes([to_bytes(each) for each in outgoing], group):
            fields |= from_bytes(data)
    return fields


def fetch_tokens(
    scored: Sequence[ScoredGroup], owners: Mapping[RolloutKey, int], groups: ProcessGroups
) -> tuple[ScoredGroup, ...]:
    """Return the batch with the tokens of this rank's share, where each response goes to a
    data-parallel index. A collective of all ranks.
    """
    world = groups.world
    rollouts = [rollout for each in scored for rollout in each.rollouts]
    own = [rollout for rollout in rollouts if rollout.is_here]
    about = torch.tensor([groups.dp.rank, len(own) < len(rollouts)])
    ranks = gather_tensor(about, world).tolist()
    if not any(lacks_some for _, lacks_some in ranks):
        return tuple(scored)
    ranks_of: dict[int, list[int]] = {}
    for rank, (index, _) in enumerate(ranks):
        ranks_of.setdefault(index, []).append(rank)
    fields = _send([(each, ranks_of[owners[each.key]]) for each in own], world)
    return tuple(
        dataclasses.replace(each, rollouts=tuple(_fill(r, fields) for r in each.rollouts))
        for each in scored
    )


def gather_values(own: Mapping[RolloutKey, Tensor], dp: Group) -> dict[RolloutKey, Tensor]:
    """Return the tensors of the whole batch by response, of which `own` is this rank's share. A
    collective of the data-parallel ranks.
    """
    named = {_name(key): values.contiguous() for key, values in own.items()}
    parts = gather_bytes(save(named) if named else b"", dp)
    return {
        _key(name): values for data in filter(None, parts) for name, values in load(data).items()
    }


def spread_requests(holders: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return the rank that continues each open response: the one of `places`, the ranks that
    generate, that has its tokens, unless it has more than its share. Few responses move.
    """
    most = -(-len(holders) // len(places))
    counts = dict.fromkeys(places, 0)
    targets: list[int | None] = []
    for holder in holders:
        stays = counts.get(holder, most) < most
        targets.append(holder if stays else None)
        if stays:
            counts[holder] += 1
    chosen = []
    for target in targets:
        if target is None:
            target = min(places, key=counts.__getitem__)
            counts[target] += 1
        chosen.append(target)
    return chosen


def move_tokens(
    rollouts: Sequence[Rollout], places: Sequence[int], group: Group
) -> tuple[list[Rollout], list[int]]:
    """Send the tokens of open responses to the ranks that continue them. A collective.

    One rank has the tokens of each. Returns the responses, of which this rank has the tokens of
    those that it continues, and the rank that continues each, one of `places`.
    """
    if not rollouts:
        return [], []
    is_here_N = torch.tensor([rollout.is_here for rollout in rollouts]).int()
    holders = (sum_tensor(is_here_N * (group.rank + 1), group) - 1).tolist()
    targets = spread_requests(holders, places)
    if holders == targets:
        return list(rollouts), targets
    leaving: list[tuple[Rollout, list[int]]] = []
    moved = []
    for rollout, holder, target in zip(rollouts, holders, targets, strict=True):
        if holder == group.rank != target:
            leaving.append((rollout, [target]))
            rollout = _without_tokens(rollout)
        moved.append(rollout)
    fields = _send(leaving, group)
    return [_fill(rollout, fields) for rollout in moved], targets


def gather_rows(own: Sequence[ScoredResponse], group: Group) -> list[ScoredResponse]:
    """Return the responses of all ranks, of which this rank has the tokens of `own` alone."""
    shares = gather_json([row_of(part) for part in own], group)
    parts: list[ScoredResponse] = []
    for rank, rows in enumerate(shares):
        parts += own if rank == group.rank else [part_of(ResponseRow(*row)) for row in rows]
    return parts


def _fill(rollout: Rollout, fields: Mapping[RolloutKey, _Fields]) -> Rollout:
    return dataclasses.replace(rollout, **fields.get(rollout.key, {}))
