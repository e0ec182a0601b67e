"""Metrics of the responses that a step or an evaluation collected. Called by the rollout worker and
the evaluator.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import torch

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.rollout.batch_rules import right_responses, scores
from tlt_megatron.rollout.speculation_log import PassTotals
from tlt_megatron.types import FinishReason, Rollout, ScoredGroup


def token_sums(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the sums over the responses whose tokens this rank has, for `rollout_metrics`."""
    rollouts = [r for g in groups for r in g.rollouts if r.is_here]
    counts = [r.generated(r.kept.counts).double() for r in rollouts if r.kept is not None]
    routes = [r.routes for r in rollouts if r.routes is not None]
    turns = [r.transcript.num_turns for r in rollouts if r.transcript]
    rewards = [each for r in rollouts if r.transcript for each in r.transcript.turn_rewards]
    return {
        "logprob": math.fsum(float(r.generated(r.logprobs).double().sum()) for r in rollouts),
        "drafted_passes": sum(len(r.accept_lengths) for r in rollouts),
        "accepted": sum(sum(r.accept_lengths) for r in rollouts),
        "kept": sum(float(each.sum()) for each in counts),
        "kept_sets": sum(int((each > 0).sum()) for each in counts),
        "kept_tokens": sum(each.numel() for each in counts),
        "routes": sum(len(each) for each in routes),
        "missing_routes": sum(int((each[:, 0, 0] < 0).sum()) for each in routes),
        "conversations": len(turns),
        "turns": sum(turns),
        "most_turns": max(turns, default=0),
        "rewarded_turns": len(rewards),
        "turn_rewards": math.fsum(rewards),
        **_by_position(rollouts),
    }


def _by_position(rollouts: Iterable[Rollout]) -> Counter[str]:
    """Return passes and tokens out of them, by the octave of the pass's position."""
    sums: Counter[str] = Counter()
    for rollout in rollouts:
        for position, count in rollout.passes:
            octave = 1 << max(position, 1).bit_length() - 1
            sums[f"passes from {octave}"] += 1
            sums[f"accepted from {octave}"] += count
    return sums


def rollout_metrics(
    groups: Sequence[ScoredGroup],
    sums: Sequence[Mapping[str, float]],
    max_prompt_tokens: int,
    right_score: float = 1.0,
) -> dict[str, float]:
    """Return the metrics of rewards, lengths and tokens of a batch, whose prompts have at most
    `max_prompt_tokens`.

    `sums` are the `token_sums` of all ranks. `right_score` as in `right_responses`.
    """
    names = dict.fromkeys(name for each in sums for name in each)
    total = {name: math.fsum(each.get(name, 0) for each in sums) for name in names}
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = torch.tensor([reward for g in groups for reward in g.rewards], dtype=torch.float64)
    lengths = torch.tensor([r.num_generated for r in rollouts], dtype=torch.float64)
    prompts = torch.tensor([len(g.prompt.token_ids) for g in groups], dtype=torch.float64)
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
    metrics["rollout/entropy"] = -total["logprob"] / float(lengths.sum())
    if total["kept_tokens"]:  # top-p or top-k; a set that was too large is not recorded
        metrics["rollout/kept_set_size"] = total["kept"] / max(total["kept_sets"], 1)
        metrics["rollout/kept_set_missing_share"] = 1 - total["kept_sets"] / total["kept_tokens"]
    if total["routes"]:
        metrics["rollout/routes_missing_share"] = total["missing_routes"] / total["routes"]
    if total["conversations"]:
        metrics["rollout/num_turns/mean"] = total["turns"] / total["conversations"]
        metrics["rollout/num_turns/max"] = float(max(each["most_turns"] for each in sums))
    if total["rewarded_turns"]:
        metrics["rollout/turn_reward/mean"] = total["turn_rewards"] / total["rewarded_turns"]
    if total["drafted_passes"]:
        metrics["rollout/spec_token_share"] = total["accepted"] / float(lengths.sum())
    for octave in (name.removeprefix("passes from ") for name in names if "passes from" in name):
        length = total[f"accepted from {octave}"] / total[f"passes from {octave}"]
        metrics[f"spec/accept_length_by_position/{octave}"] = length
    for (source, name), rows in details_by_source(groups).items():
        metrics[f"reward/{source}/{name}/mean"] = fmean(value for row in rows for value in row)
    metrics["rollout/solve_none"] = _share(groups, lambda g: max(scores(g)) <= 0)
    metrics["rollout/solve_all"] = _share(groups, lambda g: all(right_responses(g, right_score)))
    return metrics


def details_by_source(
    groups: Sequence[ScoredGroup],
) -> dict[tuple[str, str], list[tuple[float, ...]]]:
    """Return the further numbers of reward functions by (data source, name), one row per prompt of
    the data source.

    A response without a number that others of its source have counts as 0. Where two pairs would
    have one name in metrics, as `a/b` + `c` and `a` + `b/c`, the source ends with a slash.
    """
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    by_source: dict[str, list[Sequence[Mapping[str, float]]]] = defaultdict(list)
    for group in groups:
        nothing = ({},) * len(group.rewards)
        by_source[group.prompt.data_source or "unknown"].append(group.details or nothing)
    for source, rows in by_source.items():
        for name in sorted({name for row in rows for details in row for name in details}):
            found[source, name] = [tuple(each.get(name, 0.0) for each in row) for row in rows]
    counts = Counter("/".join(pair) for pair in found)
    return {
        (source if counts[f"{source}/{name}"] == 1 else f"{source}/", name): rows
        for (source, name), rows in found.items()
    }


def _share(groups: Sequence[ScoredGroup], holds: Callable[[ScoredGroup], bool]) -> float:
    return sum(holds(g) for g in groups) / len(groups)


def speculation_sums(totals: Iterable[PassTotals]) -> Counter[str]:
    """Return the sums of a rank's passes, for `speculation_metrics`.

    A row is one request in one pass. Passes of a smaller draft depth accept nothing at depth d.
    """
    sums: Counter[str] = Counter()
    for total in totals:
        sums["tokens"] += total.committed
        if not total.accepted_by_depth:
            continue
        is_learned = SpeculationStrategy.parse(total.strategy).is_learned
        for kind in ("drafting", "learned") if is_learned else ("drafting",):
            sums[f"{kind} rows"] += total.passes * total.batch_size
            sums[f"{kind} tokens"] += total.committed
        for depth, count in enumerate(total.accepted_by_depth, start=1):
            sums[f"rollout/spec_accepted_at/{depth}"] += count
    return sums


def speculation_metrics(sums: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """Return metrics of the passes that drafted: tokens out per request and pass, and acceptance at
    each draft depth.

    With a learned drafter also its accept length, and the share of all tokens from its passes.
    `sums` are the `speculation_sums` of all ranks and rounds.
    """
    total: Counter[str] = Counter()
    for each in sums:
        total.update(each)
    num_rows, num_learned = total["drafting rows"], total["learned rows"]
    if not num_rows:
        return {}
    metrics = {"rollout/spec_accept_length": total["drafting tokens"] / num_rows}
    if num_learned:
        metrics["drafter/live_accept_length"] = total["learned tokens"] / num_learned
        metrics["drafter/live_token_share"] = total["learned tokens"] / total["tokens"]
    accepted = {name: n / num_rows for name, n in total.items() if name.startswith("rollout/")}
    return metrics | accepted
