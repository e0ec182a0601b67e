"""Partial rollouts: responses are generated in rounds of a few tokens, and those that go on are
carried to the next step.

After APRIL (arXiv 2509.18521). A step waits no longer for its longest responses. It is not
lossless: a carried response has tokens of several policies, and early batches hold more short
responses. APRIL ends a round by the clock; here tokens decide, so every rank and every rerun does
the same. The rollout worker uses this file in all runs; without a limit nothing is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tlt_megatron.policy.batching import join_kept
from tlt_megatron.policy.exchange import gather_rows
from tlt_megatron.runtime.collectives import call_on_each
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.saved_files import (
    amount,
    errors_named,
    is_number,
    parse_torch,
    read_bytes,
)
from tlt_megatron.types import (
    FinishReason,
    KeptTokens,
    Prompt,
    Rollout,
    SamplingParams,
    ScoredGroup,
    ScoredResponse,
    TurnCredit,
)

_MAX_BYTES = 1 << 40  # enough for the carried responses of a large batch with their routes


class OpenResponses:
    """The responses of one RL step or evaluation over its rounds.

    One rank has the tokens of a response: the one that generates its next part, or generated its
    last.
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

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Note prompts that some rank answers in the next round."""
        self.prompts |= {prompt.draw_index: prompt for prompt in prompts}

    def open(self) -> list[Rollout]:
        """Return the responses that have not ended, oldest first."""
        return [
            response.rollout
            for _, samples in sorted(self._responses.items())
            for response in samples.values()
            if response.rollout.finish_reason is FinishReason.CUT
        ]

    def replace(self, rollouts: Iterable[Rollout]) -> None:
        """Put `rollouts` in the place of the same responses, which other ranks continue now."""
        for rollout in rollouts:
            samples = self._responses[rollout.draw_index]
            before = samples[rollout.sample_index]
            samples[rollout.sample_index] = before._replace(rollout=rollout)

    def requests(self, mine: Iterable[Rollout], prompts: Iterable[Prompt]) -> list[Prompt]:
        """Return what a rank generates in the next round: the rest of the open responses `mine`,
        whose tokens it has, then `prompts`.
        """
        limit = self._round_tokens
        continued = [self._continue(self.prompts[each.draw_index], each) for each in mine]
        return [*continued, *(dataclasses.replace(p, max_new_tokens=limit) for p in prompts)]

    def _continue(self, prompt: Prompt, so_far: Rollout) -> Prompt:
        num_tokens = so_far.token_ids.numel()
        stop = prompt.stop_in(self.params)
        return dataclasses.replace(
            prompt,
            token_ids=(*prompt.token_ids, *so_far.token_ids.tolist()),
            first_sample=so_far.sample_index,
            first_position=num_tokens,
            num_samples=1,
            max_new_tokens=min(self._round_tokens, self.params.max_new_tokens - num_tokens),
            stop=None if stop is None else stop.after(so_far.token_ids.tolist()),
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
        before, is_cut = self._so_far(part), self.is_cut(part)
        whole = part if before is None else join_parts(before, part)
        return dataclasses.replace(
            whole,
            prompt_id=self.prompts[part.draw_index].prompt_id,
            prompt_ids=_prompt_ids(self.prompts[part.draw_index], part),
            finish_reason=FinishReason.CUT if is_cut else part.finish_reason,
            # the next part begins with the passes over these tokens, under its own policy
            routes=None if is_cut else whole.routes,
        )

    def add(self, parts: Iterable[ScoredResponse]) -> None:
        """Add what all ranks generated in a round."""
        for part in parts:
            samples = self._responses.setdefault(part.rollout.draw_index, {})
            samples[part.rollout.sample_index] = part._replace(rollout=self.join(part.rollout))

    def groups(self) -> list[ScoredGroup]:
        """Return all groups so far in the order of the draws."""
        return [
            _group(self.prompts[draw], samples.values())
            for draw, samples in sorted(self._responses.items())
        ]


def _group(prompt: Prompt, responses: Iterable[ScoredResponse]) -> ScoredGroup:
    rows = sorted(responses, key=lambda row: row.rollout.sample_index)
    rollouts, rewards, details = zip(*rows, strict=True)
    return ScoredGroup(prompt=prompt, rollouts=rollouts, rewards=rewards, details=details)


def _prompt_ids(prompt: Prompt, rollout: Rollout) -> tuple[int, ...]:
    return prompt.token_ids[: len(prompt.token_ids) - rollout.num_replaced]


def join_parts(before: Rollout, part: Rollout) -> Rollout:
    """Return one response of two parts, of which `part` is the later one.

    Its routes are those of `part`, which began with the passes over all tokens before it: the
    newest tokens were drawn after those.
    """
    return dataclasses.replace(
        part,
        token_ids=torch.cat((before.token_ids, part.token_ids)),
        logprobs=torch.cat((before.logprobs, part.logprobs)),
        policy_logprobs=torch.cat((before.policy_logprobs, part.policy_logprobs)),
        passes=before.passes + part.passes,
        versions=_merge(before.versions + part.versions),
        kept=join_kept((before, part)),
    )


def _merge(parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (version, tokens) with neighbours of one version added up."""
    merged: list[tuple[int, int]] = []
    for version, num_tokens in parts:
        if merged and merged[-1][0] == version:
            num_tokens += merged.pop()[1]
        merged.append((version, num_tokens))
    return tuple(merged)


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


def save_carried(folder: Path, carried: Sequence[ScoredGroup], rank: int) -> None:
    """Write the carried responses whose tokens this rank has. Prompts are not written: draw_index
    names them.
    """
    rows, scores = [], []
    for group in carried:
        parts = zip(group.rollouts, group.rewards, group.details, strict=True)
        own = [part for part in parts if part[0].is_here]
        if own:
            rows.append([_as_row(rollout) for rollout, _, _ in own])
            scores.append(([reward for _, reward, _ in own], [dict(each) for _, _, each in own]))
    if rows:
        torch.save({"rollouts": rows, "scores": scores}, folder / f"carried_{rank:05d}.pt")


def _as_row(rollout: Rollout) -> Mapping[str, object]:
    """Return a response as values that `torch.load` accepts with weights_only."""
    turns = tuple(map(tuple, rollout.turns))
    names = {"finish_reason": str(rollout.finish_reason), "turns": turns}
    return dataclasses.asdict(rollout) | names


def load_carried(
    folder: Path, prompt_at: Callable[[int], Prompt], ranks: Group
) -> tuple[ScoredGroup, ...]:
    """Return what all ranks wrote with `save_carried`, () if they wrote nothing. A collective.

    Each rank has the tokens of the files that it reads. `prompt_at(draw_index)` returns a prompt.
    """
    files = sorted(folder.glob("carried_*.pt"))[ranks.rank :: ranks.size]
    own = call_on_each(lambda: list(chain(*map(_read_carried, files))), ranks)
    by_draw: dict[int, list[ScoredResponse]] = {}
    for part in gather_rows(own, ranks):
        by_draw.setdefault(part.rollout.draw_index, []).append(part)
    groups = []
    for draw, parts in sorted(by_draw.items()):
        prompt = prompt_at(draw)
        whole = []
        for part in parts:
            ids = _prompt_ids(prompt, part.rollout)
            rollout = dataclasses.replace(part.rollout, prompt_id=prompt.prompt_id, prompt_ids=ids)
            whole.append(part._replace(rollout=rollout))
        groups.append(_group(prompt, whole))
    return tuple(groups)


def _read_carried(path: Path) -> list[ScoredResponse]:
    found: list[ScoredResponse] = []
    with errors_named(path):
        saved = parse_torch(path, read_bytes(path, _MAX_BYTES))
        for rows, (rewards, details) in zip(saved["rollouts"], saved["scores"], strict=True):
            for row, reward, more in zip(rows, rewards, details, strict=True):
                found.append(ScoredResponse(_from_row(row), reward, more))
                _check_response(found[-1])
    return found


def _from_row(row: dict[str, Any]) -> Rollout:
    row.pop("verify_starts", None)  # older checkpoints have it, and the next
    version = row.pop("policy_version", None)
    row["versions"] = row["versions"] or ((version, row["token_ids"].numel()),)
    row["finish_reason"] = FinishReason(row["finish_reason"])
    row["turns"] = tuple(TurnCredit(*turn) for turn in row.get("turns", ()))
    row["kept"] = row["kept"] and KeptTokens(**row["kept"])
    return Rollout(**row)


def _check_response(response: ScoredResponse) -> None:
    """Raise ValueError for a response of other lengths or types than a run carries."""
    rollout = response.rollout
    tensors = (rollout.token_ids, rollout.logprobs, rollout.policy_logprobs)
    num_tokens = rollout.token_ids.numel()
    masks = [] if rollout.loss_mask is None else [rollout.loss_mask]
    drawn = [int(amount(number)) for pair in rollout.versions for number in pair]
    places = [int(amount(each)) for each in rollout.key]
    is_good = (
        all(tensor.shape == (num_tokens,) for tensor in (*tensors, *masks))
        and rollout.token_ids.dtype == torch.int64
        and bool((rollout.token_ids >= 0).all())
        and all(each.is_floating_point() and each.isfinite().all() for each in tensors[1:])
        and sum(drawn[1::2]) == num_tokens
        and all(map(is_number, (response.reward, *response.details.values())))
    )
    if not is_good:
        raise ValueError(f"the response of draw and sample {places} is not as a run carries it")
