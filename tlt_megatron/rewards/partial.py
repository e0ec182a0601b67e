"""Partial rollouts: responses are generated in rounds of a few tokens, and those that go on are carried to the next step.

After APRIL (arXiv 2509.18521). A step waits no longer for its longest responses. It is not lossless: a carried response has
tokens of several policies, and early batches hold more short responses. APRIL ends a round by the clock; here tokens decide,
so every rank and every rerun does the same. The rollout worker uses this file in all runs; without a limit nothing is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tlt_megatron.types import (
    FinishReason,
    KeptTokens,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    ScoredGroup,
)

_FILE = "carried_responses.pt"  # in a checkpoint
_FIELDS = [field.name for field in dataclasses.fields(Rollout)]
_Scored = tuple[Rollout, float, Mapping[str, float]]  # a response, its reward and further numbers


class OpenResponses:
    """The responses of one RL step or evaluation over its rounds. All ranks hold all of them between two rounds."""

    def __init__(
        self, params: SamplingParams, *, round_tokens: int = 0, carried: Sequence[ScoredGroup] = ()
    ) -> None:
        """`round_tokens`: most tokens of a response in a round; 0: no limit. `carried`: from the step before."""
        self.params = params
        self._round_tokens = round_tokens or params.max_new_tokens
        self._prompts: dict[int, Prompt] = {}  # by draw_index
        self._scored: dict[int, dict[int, _Scored]] = {}  # by draw_index and sample_index
        for group in carried:
            self._prompts[group.group.prompt.draw_index] = group.group.prompt
        self.add(carried)

    def requests(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return what to generate in the next round: the rest of all open responses, oldest first, then `prompts`."""
        self._prompts |= {prompt.draw_index: prompt for prompt in prompts}
        continued = [
            self._continue(self._prompts[draw], rollout)
            for draw, samples in sorted(self._scored.items())
            for rollout, _, _ in samples.values()
            if rollout.finish_reason is FinishReason.CUT
        ]
        if self._round_tokens >= self.params.max_new_tokens:
            return [*continued, *prompts]
        limit = self._round_tokens
        return [*continued, *(dataclasses.replace(p, max_new_tokens=limit) for p in prompts)]

    def _continue(self, prompt: Prompt, so_far: Rollout) -> Prompt:
        num_tokens = so_far.token_ids.numel()
        return dataclasses.replace(
            prompt,
            token_ids=(*prompt.token_ids, *so_far.token_ids.tolist()),
            first_sample=so_far.sample_index,
            first_position=num_tokens,
            num_samples=1,
            max_new_tokens=min(self._round_tokens, self.params.max_new_tokens - num_tokens),
        )

    def join(self, new: Rollout) -> Rollout:
        """Return the whole response that `new` continues. Its finish_reason is CUT if it may go on."""
        samples = self._scored.get(new.draw_index, {})
        if new.sample_index in samples:
            before = samples[new.sample_index][0]
            new = dataclasses.replace(
                new,
                prompt_ids=before.prompt_ids,
                token_ids=torch.cat((before.token_ids, new.token_ids)),
                logprobs=torch.cat((before.logprobs, new.logprobs)),
                policy_logprobs=torch.cat((before.policy_logprobs, new.policy_logprobs)),
                accept_lengths=before.accept_lengths + new.accept_lengths,
                versions=_merge(before.parts + new.parts),
                verify_starts=before.verify_starts
                + tuple(before.token_ids.numel() + start for start in new.verify_starts),
                kept=_join_kept((before, new)),
            )
        limit = self.params.max_new_tokens
        is_limited = self._round_tokens < limit and new.finish_reason is FinishReason.LENGTH
        if is_limited and new.token_ids.numel() < limit:
            new = dataclasses.replace(new, finish_reason=FinishReason.CUT)
        return new

    def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Add what all ranks generated in a round: joined responses. A continued one replaces what it continues."""
        for group in groups:
            samples = self._scored.setdefault(group.group.prompt.draw_index, {})
            for scored in zip(group.group.rollouts, group.rewards, group.details, strict=True):
                samples[scored[0].sample_index] = scored

    def groups(self) -> list[ScoredGroup]:
        """Return all groups so far in the order of the draws."""
        groups = []
        for draw, samples in sorted(self._scored.items()):
            rollouts, rewards, details = zip(
                *(scored for _, scored in sorted(samples.items())), strict=True
            )
            group = RolloutGroup(prompt=self._prompts[draw], rollouts=rollouts)
            groups.append(ScoredGroup(group=group, rewards=rewards, details=details))
        return groups


def _merge(parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (version, tokens) with neighbours of one version added up; () for a single version."""
    merged: list[tuple[int, int]] = []
    for version, num_tokens in parts:
        if merged and merged[-1][0] == version:
            num_tokens += merged.pop()[1]
        merged.append((version, num_tokens))
    return tuple(merged) if len(merged) > 1 else ()


def _join_kept(parts: Sequence[Rollout]) -> KeptTokens | None:
    kept = [part.kept or _all_kept(part.token_ids.numel()) for part in parts]
    if all(part.kept is None for part in parts):
        return None
    return KeptTokens(
        token_ids=torch.cat([each.token_ids for each in kept]),
        counts=torch.cat([each.counts for each in kept]),
    )


def _all_kept(num_tokens: int) -> KeptTokens:
    none = torch.zeros(0, dtype=torch.int32)
    return KeptTokens(token_ids=none, counts=none.new_zeros(num_tokens))


def carried_metrics(
    batch: Sequence[ScoredGroup], carried: Sequence[ScoredGroup], *, policy_version: int
) -> dict[str, float]:
    """Return the number of open responses, and the age of the batch's tokens in RL steps."""
    parts = [part for group in batch for rollout in group.group.rollouts for part in rollout.parts]
    num_tokens = sum(count for _, count in parts)
    is_open = [r.finish_reason is FinishReason.CUT for g in carried for r in g.group.rollouts]
    return {
        "rollout/carried_responses": float(sum(is_open)),
        "rollout/policy_age/mean": sum((policy_version - v) * n for v, n in parts) / num_tokens,
        "rollout/policy_age/max": float(policy_version - min(version for version, _ in parts)),
    }


# ---- checkpoints


def save_carried(folder: Path, carried: Sequence[ScoredGroup]) -> None:
    """Write the groups that a step left over. Prompts are not written: draw_index names them."""
    rows = [
        [
            {name: _plain(getattr(rollout, name)) for name in _FIELDS}
            for rollout in group.group.rollouts
        ]
        for group in carried
    ]
    scores = [(group.rewards, [dict(each) for each in group.details]) for group in carried]
    torch.save({"rollouts": rows, "scores": scores}, folder / _FILE)


def _plain(value: object) -> object:
    """Return a value that torch.load takes from anyone."""
    if isinstance(value, KeptTokens):
        return {"token_ids": value.token_ids, "counts": value.counts}
    return str(value) if isinstance(value, FinishReason) else value


def load_carried(folder: Path, prompt_at: Callable[[int], Prompt]) -> tuple[ScoredGroup, ...]:
    """Return what `save_carried` wrote, () if it wrote nothing. `prompt_at(draw_index)` returns a prompt."""
    path = folder / _FILE
    if not path.exists():
        return ()
    saved = torch.load(path, weights_only=True)
    groups = []
    for rows, (rewards, details) in zip(saved["rollouts"], saved["scores"], strict=True):
        for row in rows:
            row["finish_reason"] = FinishReason(row["finish_reason"])
            row["kept"] = row["kept"] and KeptTokens(**row["kept"])
        rollouts = tuple(Rollout(**row) for row in rows)
        group = RolloutGroup(prompt=prompt_at(rollouts[0].draw_index), rollouts=rollouts)
        groups.append(ScoredGroup(group=group, rewards=rewards, details=tuple(details)))
    return tuple(groups)
