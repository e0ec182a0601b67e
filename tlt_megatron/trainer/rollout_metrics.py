"""Metrics of the responses that a step or an evaluation collected. Called by the rollout worker and the evaluator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.rewards.batch_rules import right_responses, scores
from tlt_megatron.trainer.speculation_log import PassTotals
from tlt_megatron.types import FinishReason, ScoredGroup


def rollout_metrics(
    groups: Sequence[ScoredGroup], max_prompt_tokens: int, right_score: float = 1.0
) -> dict[str, float]:
    """Return the metrics of rewards and lengths of a batch, whose prompts have at most `max_prompt_tokens`.

    `right_score` as in `right_responses`.
    """
    rollouts = [r for g in groups for r in g.group.rollouts]
    rewards = torch.tensor([reward for g in groups for reward in g.rewards], dtype=torch.float64)
    lengths = torch.tensor([r.num_generated for r in rollouts], dtype=torch.float64)
    prompts = torch.tensor([len(g.group.prompt.token_ids) for g in groups], dtype=torch.float64)
    cut = torch.tensor([r.finish_reason == FinishReason.LENGTH for r in rollouts]).double()
    metrics = {
        "response_length/clip_ratio": float(cut.mean()),
        "prompt_length/clip_ratio": float((prompts == max_prompt_tokens).double().mean()),
    }
    for name, values in (
        ("critic/score", rewards),
        ("critic/rewards", rewards),
        ("response_length", lengths),
        ("prompt_length", prompts),
    ):
        metrics[f"{name}/mean"] = float(values.mean())
        metrics[f"{name}/max"] = float(values.max())
        metrics[f"{name}/min"] = float(values.min())
    metrics["response_length/median"] = float(lengths.median())
    metrics["rollout/num_tokens"] = float(sum(r.num_tokens for r in rollouts))
    # a sample of the entropy over all tokens; actor/entropy omits responses without a gradient
    metrics["rollout/entropy"] = -float(
        torch.cat([r.generated(r.logprobs) for r in rollouts]).mean()
    )
    metrics |= _kept_metrics([r.generated(r.kept.counts) for r in rollouts if r.kept is not None])
    turns = [r.transcript.num_turns for r in rollouts if r.transcript]
    if turns:
        metrics["rollout/num_turns/mean"] = fmean(turns)
        metrics["rollout/num_turns/max"] = float(max(turns))
    accepted = [n for r in rollouts for n in r.accept_lengths]
    if accepted:
        metrics["rollout/spec_token_share"] = sum(accepted) / float(lengths.sum())
    for (source, name), rows in details_by_source(groups).items():
        metrics[f"reward/{source}/{name}/mean"] = fmean(value for row in rows for value in row)
    metrics["rollout/solve_none"] = _share(groups, lambda g: max(scores(g)) <= 0)
    metrics["rollout/solve_all"] = _share(groups, lambda g: all(right_responses(g, right_score)))
    return metrics


def _kept_metrics(kept: Sequence[Tensor]) -> dict[str, float]:
    """Return the size of the sets that top-p and top-k kept, and the share of tokens without a recorded set.

    `kept` holds `KeptTokens.counts` of the policy's tokens."""
    if not kept:
        return {}
    counts = torch.cat(list(kept)).double()
    is_recorded = counts > 0
    return {
        "rollout/kept_set_size": float(counts.sum() / is_recorded.sum().clamp(min=1)),
        "rollout/kept_set_missing_share": 1 - float(is_recorded.double().mean()),
    }


def details_by_source(
    groups: Sequence[ScoredGroup],
) -> dict[tuple[str, str], list[tuple[float, ...]]]:
    """Return the further numbers of reward functions by (data source, name), one row per prompt.

    Responses without such a number are left out.
    """
    found: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    for group in groups:
        source = group.group.prompt.data_source or "unknown"
        for name in sorted({name for details in group.details for name in details}):
            row = tuple(details[name] for details in group.details if name in details)
            found[source, name].append(row)
    return found


def _share(groups: Sequence[ScoredGroup], holds: Callable[[ScoredGroup], bool]) -> float:
    return sum(holds(g) for g in groups) / len(groups)


def speculation_metrics(totals: Sequence[PassTotals]) -> dict[str, float]:
    """Return metrics of the passes that drafted: tokens out per request and pass, and acceptance at each draft depth.

    With a learned drafter also its accept length, and the share of all tokens from its passes.
    """
    drafting = [total for total in totals if total.accepted_by_depth]
    num_rows = sum(total.passes * total.batch_size for total in drafting)
    if not num_rows:
        return {}
    metrics = {"rollout/spec_accept_length": sum(t.committed for t in drafting) / num_rows}
    learned = [t for t in drafting if SpeculationStrategy.parse(t.strategy).is_learned]
    if learned:
        num_learned = sum(total.passes * total.batch_size for total in learned)
        num_tokens = sum(total.committed for total in learned)
        metrics["drafter/live_accept_length"] = num_tokens / num_learned
        metrics["drafter/live_token_share"] = num_tokens / sum(total.committed for total in totals)
    for depth in range(max(len(total.accepted_by_depth) for total in drafting)):
        # Strategies of a smaller draft depth count as not accepted at this depth.
        accepted = sum(sum(t.accepted_by_depth[depth : depth + 1]) for t in drafting)
        metrics[f"rollout/spec_accepted_at/{depth + 1}"] = accepted / num_rows
    return metrics
