"""Which groups form the batch of an RL step, and soft overlong punishment.

Dynamic sampling and the punishment are DAPO's (Yu et al. 2025, arXiv 2503.14476). With partial
rollouts (open_responses.py), a step has as many rounds as its batch needs. The rollout worker
applies the rules between the rewards and the update. They depend on the drawn prompts, their
responses and rewards alone, so every rank decides the same, with any number of ranks and after a
resume.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlt_megatron.types import FinishReason, Prompt, ScoredGroup

_OVERLONG = "overlong_reward"  # the punishment, as a metric beside the further numbers
_ROUNDING = 1e-6  # rounding error of a weighted sum of scores


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """How the batch of an RL step is made.

    With the defaults, it is the prompts of one round with their rewards.
    """

    num_prompts: int  # in the batch
    right_score: float = 1.0  # as in `right_responses`
    max_rounds: int = 1  # generation rounds of a step, at most
    # that must differ within a group: score, reward (with the punishment), or a further number;
    # "": no dynamic sampling
    metric: str = ""
    round_tokens: int = 0  # partial rollouts: most tokens of a response in a round; 0: off
    num_drawn: int = 0  # partial rollouts: prompts drawn at the start of a step; 0: num_prompts
    max_prompt_tokens: int = 0
    max_new_tokens: int = 0
    overlong_tokens: int = 0  # length of the interval before max_new_tokens; 0: no punishment
    overlong_penalty: float = 1.0

    def punish_overlong(self, group: ScoredGroup) -> ScoredGroup:
        """Add the punishment of each response to its reward (eq. 13).

        It is 0 up to max_new_tokens - overlong_tokens, and falls linearly to -overlong_penalty at
        max_new_tokens.
        """
        if not self.overlong_tokens:
            return group
        free = self.max_new_tokens - self.overlong_tokens
        added = [
            min(0.0, (free - r.num_generated) / self.overlong_tokens) * self.overlong_penalty
            for r in group.rollouts
        ]
        # a number of the user's function may have this name too, and keeps it
        details = [{_OVERLONG: a, **own} for own, a in zip(group.details, added, strict=True)]
        rewards = [reward + a for reward, a in zip(group.rewards, added, strict=True)]
        return dataclasses.replace(
            group, rewards=tuple(rewards), details=tuple(details), punishments=tuple(added)
        )

    def num_first(self, carried: Sequence[ScoredGroup]) -> int:
        """Return how many prompts to draw at the start of a step, fewer by the complete groups of
        `carried`.
        """
        num_complete = sum(group.is_complete for group in carried)
        return max(0, (self.num_drawn or self.num_prompts) - num_complete)

    def is_complete(self, groups: Sequence[ScoredGroup], num_rounds: int) -> bool:
        """Return whether `groups`, which are complete after `num_rounds`, hold a batch."""
        if len(groups) < self.num_prompts:
            return False
        return num_rounds >= self.max_rounds or len(self.kept(groups)) >= self.num_prompts

    def num_missing(self, groups: Sequence[ScoredGroup]) -> int:
        """Return how many more prompts to draw if `groups`, those of all rounds so far, hold no
        batch.

        As many as will probably complete the batch, at the share of groups kept so far, and at most
        num_prompts.
        """
        num_kept = len(self.kept(groups))
        missing = max(0, self.num_prompts - num_kept)
        return min(self.num_prompts, math.ceil(missing * len(groups) / max(num_kept, 1)))

    def select(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Return the batch in the order of the draws: the first num_prompts groups that are kept
        (eq. 11), punished.

        If there are fewer, the first of the others fill it up, as without dynamic sampling.
        """
        chosen = self.kept(groups)[: self.num_prompts]
        kept = {group.prompt.draw_index for group in chosen}
        others = [group for group in groups if group.prompt.draw_index not in kept]
        chosen += others[: self.num_prompts - len(chosen)]
        chosen.sort(key=lambda group: group.prompt.draw_index)
        return [self.punish_overlong(group) for group in chosen]

    def carry(
        self, groups: Sequence[ScoredGroup], batch: Sequence[ScoredGroup]
    ) -> list[ScoredGroup]:
        """Return the groups for the next step: those with open responses, and kept ones that the
        batch has no place for.

        `groups` are all groups. [] without partial rollouts.
        """
        if not self.round_tokens:
            return []
        done = {group.prompt.draw_index for group in batch}
        rest = [group for group in groups if group.prompt.draw_index not in done]
        kept = self.kept([group for group in rest if group.is_complete])
        waiting = {group.prompt.draw_index for group in kept}
        return [g for g in rest if not g.is_complete or g.prompt.draw_index in waiting]

    def still_fit(self, carried: Sequence[ScoredGroup], *, num_samples: int) -> list[ScoredGroup]:
        """Return the carried groups of a checkpoint that fit these rules, which may have changed
        since.

        A group has num_samples responses. A response has at most max_new_tokens, and fewer if it
        has not ended. [] without partial rollouts.
        """
        if not self.round_tokens:
            return []
        return [
            group
            for group in carried
            if len(group.rollouts) == num_samples
            and all(
                r.token_ids.numel() + (r.finish_reason is FinishReason.CUT) <= self.max_new_tokens
                for r in group.rollouts
            )
        ]

    def metrics(self, groups: Sequence[ScoredGroup], num_rounds: int) -> dict[str, float]:
        """Return the metrics of dynamic sampling; {} without it."""
        if not self.metric:
            return {"train/num_gen_batches": float(num_rounds)} if self.round_tokens else {}
        num_kept = len(self.kept(groups))
        return {
            "train/num_gen_batches": float(num_rounds),
            "rollout/extra_draws": float(len(groups) - self.num_prompts),
            "rollout/kept_group_share": num_kept / len(groups),
            "rollout/filler_groups": float(max(0, self.num_prompts - num_kept)),
        }

    def kept(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Return the groups whose responses differ in the metric; all groups without dynamic
        sampling.

        `groups` are not punished yet. ValueError if results of the function lack the metric.
        """
        if not self.metric:
            return list(groups)
        # a response whose scoring failed has no further numbers, and reward 0
        if self.metric == "score":
            values = [group.rewards for group in groups]
        elif self.metric == "reward":
            values = [self.punish_overlong(group).rewards for group in groups]
        else:
            names = {name for group in groups for details in group.details for name in details}
            if self.metric not in names and (names or any(any(g.rewards) for g in groups)):
                raise ValueError(
                    f"algorithm.filter_groups={self.metric!r}: must be score, reward or a further number of the "
                    f"reward function, which returned {sorted(names)}"
                )
            values = [[details.get(self.metric, 0.0) for details in g.details] for g in groups]
        return [group for group, row in zip(groups, values, strict=True) if min(row) < max(row)]


def scores(group: ScoredGroup) -> list[float]:
    """Return the rewards of a group without the punishments."""
    added = group.punishments or (0.0,) * len(group.rewards)
    return [reward - own for reward, own in zip(group.rewards, added, strict=True)]


def right_responses(group: ScoredGroup, right_score: float) -> list[bool]:
    """Return for each response whether its score is at least `right_score`, up to rounding."""
    return [score >= right_score - _ROUNDING for score in scores(group)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The rules of a step, how further prompts are drawn for it, and the groups that the step
    before left over.
    """

    rules: BatchRules
    draw: Callable[[int], Sequence[Prompt]]
    carried: Sequence[ScoredGroup] = ()
