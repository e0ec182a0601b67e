"""Partial rollouts: responses are generated in rounds of a few tokens, and those that go on are
carried to the next step.

After APRIL (arXiv 2509.18521). A step waits no longer for its longest responses. It is not
lossless: a carried response has tokens of several policies, and early batches hold more short
responses. APRIL ends a round by the clock; here tokens decide, so every rank and every rerun does
the same. The rollout worker uses this file in all runs; without a limit nothing is cut.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.policy.batching import join_kept
from tlt_megatron.saved_files import amount, errors_named, is_number, read_bytes
from tlt_megatron.types import (
    FinishReason,
    KeptTokens,
    Prompt,
    Rollout,
    SamplingParams,
    ScoredGroup,
    ScoredResponse,
)

_FILE = "carried_responses.pt"  # in a checkpoint
_MAX_BYTES = 1 << 40  # the responses of a large batch with their routes


class OpenResponses:
    """The responses of one RL step or evaluation over its rounds.

    With a limit on a round's tokens, any rank may continue a response, so all ranks have all
    tokens.
    """

    def __init__(
        self, params: SamplingParams, *, round_tokens: int = 0, carried: Sequence[ScoredGroup] = ()
    ) -> None:
        """`round_tokens`: most tokens of a response in a round; 0: no limit.

        `carried`: from the step before.
        """
        self.params = params
        self._round_tokens = round_tokens or params.max_new_tokens
        self.prompts: dict[int, Prompt] = {}  # as drawn, by draw_index
        self._responses: dict[int, dict[int, ScoredResponse]] = {}  # by draw_index, sample_index
        for scored in carried:
            prompt, rollouts = scored.prompt, scored.rollouts
            self.prompts[prompt.draw_index] = prompt
            rows = map(ScoredResponse, rollouts, scored.rewards, scored.details)
            self._responses[prompt.draw_index] = {row.rollout.sample_index: row for row in rows}

    def requests(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return what to generate in the next round: the rest of all open responses, oldest first,
        then `prompts`.
        """
        self.prompts |= {prompt.draw_index: prompt for prompt in prompts}
        continued = [
            self._continue(self.prompts[draw], response.rollout)
            for draw, samples in sorted(self._responses.items())
            for response in samples.values()
            if response.rollout.finish_reason is FinishReason.CUT
        ]
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

    def _so_far(self, part: Rollout) -> Rollout | None:
        """Return the response that `part` continues."""
        response = self._responses.get(part.draw_index, {}).get(part.sample_index)
        return None if response is None else response.rollout

    def is_cut(self, part: Rollout) -> bool:
        """Return whether a later round continues `part`, which this round generated."""
        if part.finish_reason is not FinishReason.LENGTH:
            return False
        before = self._so_far(part)
        num_tokens = part.token_ids.numel() + (0 if before is None else before.token_ids.numel())
        return self._round_tokens < self.params.max_new_tokens > num_tokens

    def join(self, part: Rollout) -> Rollout:
        """Return the whole response of which this round generated `part`. Its finish_reason is CUT
        if it goes on.

        `part` needs no prompt.
        """
        before = self._so_far(part)
        return dataclasses.replace(
            part if before is None else join_parts(before, part),
            prompt_id=self.prompts[part.draw_index].prompt_id,
            prompt_ids=self.prompts[part.draw_index].token_ids,
            finish_reason=FinishReason.CUT if self.is_cut(part) else part.finish_reason,
        )

    def add(self, parts: Iterable[ScoredResponse]) -> None:
        """Add what all ranks generated in a round."""
        for part in parts:
            samples = self._responses.setdefault(part.rollout.draw_index, {})
            samples[part.rollout.sample_index] = part._replace(rollout=self.join(part.rollout))

    def groups(self) -> list[ScoredGroup]:
        """Return all groups so far in the order of the draws."""
        groups = []
        for draw, samples in sorted(self._responses.items()):
            rows = [response for _, response in sorted(samples.items())]
            rollouts, rewards, details = zip(*rows, strict=True)
            prompt = self.prompts[draw]
            groups.append(
                ScoredGroup(prompt=prompt, rollouts=rollouts, rewards=rewards, details=details)
            )
        return groups


def join_parts(before: Rollout, part: Rollout) -> Rollout:
    """Return one response of two parts, of which `part` is the later one."""
    return dataclasses.replace(
        part,
        token_ids=torch.cat((before.token_ids, part.token_ids)),
        logprobs=torch.cat((before.logprobs, part.logprobs)),
        policy_logprobs=torch.cat((before.policy_logprobs, part.policy_logprobs)),
        accept_lengths=before.accept_lengths + part.accept_lengths,
        versions=_merge(before.versions + part.versions),
        kept=join_kept((before, part)),
        routes=_join_routes(before.routes, part.routes),
    )


def _merge(parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (version, tokens) with neighbours of one version added up."""
    merged: list[tuple[int, int]] = []
    for version, num_tokens in parts:
        if merged and merged[-1][0] == version:
            num_tokens += merged.pop()[1]
        merged.append((version, num_tokens))
    return tuple(merged)


def _join_routes(before: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return the routes of both parts, for each token those of the pass that drew the next one.

    The later part begins with the passes over all tokens before it.
    """
    if before is None or part is None:
        return part
    return torch.cat((before, part[before.shape[0] :]))


def carried_metrics(
    batch: Sequence[ScoredGroup], carried: Sequence[ScoredGroup], *, policy_version: int
) -> dict[str, float]:
    """Return the number of open responses, and the age of the batch's tokens in RL steps."""
    parts = [part for group in batch for rollout in group.rollouts for part in rollout.versions]
    num_tokens = sum(count for _, count in parts)
    is_open = [r.finish_reason is FinishReason.CUT for g in carried for r in g.rollouts]
    return {
        "rollout/carried_responses": float(sum(is_open)),
        "rollout/policy_age/mean": sum((policy_version - v) * n for v, n in parts) / num_tokens,
        "rollout/policy_age/max": float(policy_version - min(version for version, _ in parts)),
    }


# ---- checkpoints


def save_carried(folder: Path, carried: Sequence[ScoredGroup]) -> None:
    """Write the groups that a step left over. Prompts are not written: draw_index names them."""
    rows = [[_as_row(rollout) for rollout in group.rollouts] for group in carried]
    scores = [(group.rewards, [dict(each) for each in group.details]) for group in carried]
    torch.save({"rollouts": rows, "scores": scores}, folder / _FILE)


def _as_row(rollout: Rollout) -> Mapping[str, object]:
    """Return a response as values that `torch.load` accepts with weights_only."""
    return dataclasses.asdict(rollout) | {"finish_reason": str(rollout.finish_reason)}


def load_carried(folder: Path, prompt_at: Callable[[int], Prompt]) -> tuple[ScoredGroup, ...]:
    """Return what `save_carried` wrote, () if it wrote nothing.

    `prompt_at(draw_index)` returns a prompt.
    """
    path = folder / _FILE
    if not path.exists():
        return ()
    with errors_named(path):
        data = io.BytesIO(read_bytes(path, _MAX_BYTES))
        return _carried(torch.load(data, weights_only=True), prompt_at)


def _carried(saved: Any, prompt_at: Callable[[int], Prompt]) -> tuple[ScoredGroup, ...]:
    groups = []
    for rows, (rewards, details) in zip(saved["rollouts"], saved["scores"], strict=True):
        for row in rows:
            row.pop("verify_starts", None)  # of older checkpoints, as is the next
            version = row.pop("policy_version", None)
            row["versions"] = row["versions"] or ((version, row["token_ids"].numel()),)
            row["finish_reason"] = FinishReason(row["finish_reason"])
            row["kept"] = row["kept"] and KeptTokens(**row["kept"])
        rollouts = tuple(Rollout(**row) for row in rows)
        prompt, details = prompt_at(int(amount(rollouts[0].draw_index))), tuple(details)
        _check_group(prompt, rollouts, rewards, details)
        groups.append(
            ScoredGroup(prompt=prompt, rollouts=rollouts, rewards=rewards, details=details)
        )
    return tuple(groups)


def _check_group(
    prompt: Prompt,
    rollouts: Sequence[Rollout],
    rewards: Sequence[float],
    details: Sequence[Mapping[str, float]],
) -> None:
    """Raise ValueError for a group of other prompts, lengths or types than a run carries."""
    numbers = [*rewards, *chain.from_iterable(each.values() for each in details)]
    is_whole = len(rewards) == len(rollouts) and len(details) in (0, len(rollouts))
    if not (is_whole and all(map(is_number, numbers))):
        raise ValueError("rewards must be numbers, one for each response")
    for index, each in enumerate(rollouts):
        tensors = (each.token_ids, each.logprobs, each.policy_logprobs)
        shapes = {tuple(tensor.shape) for tensor in tensors}
        num_tokens = each.token_ids.numel()
        drawn = [int(amount(number)) for pair in each.versions for number in pair]
        masks = [] if each.loss_mask is None else [each.loss_mask]
        is_good = (
            shapes == {(num_tokens,)}
            and all(mask.shape == (num_tokens,) for mask in masks)
            and (each.draw_index, each.sample_index) == (prompt.draw_index, index)
            and each.token_ids.dtype == torch.int64
            and all(
                tensor.is_floating_point() and tensor.isfinite().all() for tensor in tensors[1:]
            )
            and tuple(each.prompt_ids) == tuple(prompt.token_ids)
            and sum(drawn[1::2]) == num_tokens
            and bool((each.token_ids >= 0).all())
        )
        if not is_good:
            raise ValueError(f"response {index} of draw {prompt.draw_index} is not one of this run")
