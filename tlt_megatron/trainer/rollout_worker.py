"""Prompts -> scored rollouts. Each rank answers its share; the whole batch is exchanged when the last is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tlt_megatron.engines.base import RolloutEngine
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.trainer.phases import Phases
from tlt_megatron.types import FinishReason, Prompt, Rollout, SamplingParams, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The batch of one rollout phase, the same on every rank, in the order of the prompts."""

    groups: tuple[ScoredGroup, ...]
    metrics: dict[str, float]


class RolloutWorker:
    """Drives this rank's engine and reward workers. `replicas` are the ranks with an engine of their own."""

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: RewardPool,
        decode: Callable[[Sequence[int]], str],
        *,
        replicas: Group,
        phases: Phases,
    ) -> None:
        self.engine = engine
        self.rewards = rewards
        self.decode = decode
        self.replicas = replicas
        self.phases = phases

    def collect(
        self, prompts: Sequence[Prompt], params: SamplingParams, policy_version: int
    ) -> Collected:
        """Generate, score as responses finish, exchange. A collective of all replicas."""
        by_draw = {prompt.draw_index: prompt for prompt in prompts}

        def score(rollout: Rollout) -> None:
            key = (rollout.draw_index, rollout.sample_index)
            text = self.decode(rollout.token_ids.tolist())
            self.rewards.submit(key, by_draw[rollout.draw_index], text)

        mine = prompts[self.replicas.rank :: self.replicas.size]
        with self.phases("DECODE", "gen", prompts=len(mine)):
            groups = self.engine.generate(
                mine, params, policy_version=policy_version, on_finish=score
            )
        with self.phases("REWARD", "reward"):
            rewards = self.rewards.collect()
        scored = [
            ScoredGroup(
                group=group,
                rewards=tuple(rewards[r.draw_index, r.sample_index] for r in group.rollouts),
            )
            for group in groups
        ]
        stats = self.engine.stats()
        finished = time.perf_counter()
        with self.phases("WAIT", "wait"):
            shares = gather_objects((scored, self.rewards.take_stats(), stats), self.replicas)
        idle_s = time.perf_counter() - finished
        everyone = sorted(
            (g for share, _, _ in shares for g in share), key=lambda g: g.group.prompt.draw_index
        )
        metrics = rollout_metrics(everyone)
        idle = gather_objects(idle_s, self.replicas)
        metrics["bubble/idle_s"] = sum(idle)
        metrics["perf/rollout_tokens_per_s"] = sum(
            s.num_generated_tokens for _, _, s in shares
        ) / max(s.seconds for _, _, s in shares)
        metrics["rollout/preemptions"] = float(sum(s.num_preemptions for _, _, s in shares))
        for name in ("num_errors", "num_timeouts"):
            metrics[f"reward/{name}"] = float(sum(getattr(r, name) for _, r, _ in shares))
        return Collected(groups=tuple(everyone), metrics=metrics)


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Rewards and lengths of a batch under the field's names."""
    rollouts = [r for g in groups for r in g.group.rollouts]
    rewards = torch.tensor([reward for g in groups for reward in g.rewards], dtype=torch.float64)
    lengths = torch.tensor([r.token_ids.numel() for r in rollouts], dtype=torch.float64)
    cut = torch.tensor([r.finish_reason == FinishReason.LENGTH for r in rollouts]).double()
    metrics = {"response_length/clip_ratio": float(cut.mean())}
    for name, values in (("critic/rewards", rewards), ("response_length", lengths)):
        metrics[f"{name}/mean"] = float(values.mean())
        metrics[f"{name}/max"] = float(values.max())
        metrics[f"{name}/min"] = float(values.min())
    metrics["response_length/median"] = float(lengths.median())
    metrics["rollout/num_tokens"] = float(sum(r.num_tokens for r in rollouts))
    accepted = [n for r in rollouts for n in r.accept_lengths]
    if accepted:  # tokens out per verify pass, bonus token included
        metrics["rollout/spec_accept_length"] = sum(accepted) / len(accepted)
        metrics["rollout/spec_token_share"] = sum(accepted) / float(lengths.sum())
    metrics["prompt_length/mean"] = sum(len(g.group.prompt.token_ids) for g in groups) / len(groups)
    metrics["rollout/solve_none"] = _share(groups, lambda g: max(g.rewards) <= 0)
    metrics["rollout/solve_all"] = _share(groups, lambda g: min(g.rewards) >= 1)
    return metrics


def _share(groups: Sequence[ScoredGroup], holds: Callable[[ScoredGroup], bool]) -> float:
    return sum(holds(g) for g in groups) / len(groups)
