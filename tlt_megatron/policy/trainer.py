"""Turns one batch of scored rollouts into an updated policy. It splits the batch over data-parallel ranks.

Every rank gets the whole batch and computes its share from lengths, so ranks only exchange sums.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.batching import (
    attach_experiences,
    balance_by_tokens,
    pack_by_tokens,
    pack_rollouts,
    response_slices,
    split_evenly,
)
from tlt_megatron.policy.health import EngineDifference, TrainingHealth
from tlt_megatron.policy.interfaces import HiddenTap, LossFunction, LossResult, PolicyModel
from tlt_megatron.policy.loss import PolicyLoss, kl_estimate
from tlt_megatron.rewards.advantage import compute_advantages
from tlt_megatron.runtime.collectives import broadcast_object, gather_objects, sum_metrics
from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.types import Experience, MicroBatch, Rollout, ScoredGroup, TokenLogprobs

log = logging.getLogger(__name__)

RolloutKey = tuple[int, int]  # (index of the group in the batch, sample_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One micro-batch of this rank and the rollouts in it, in packed order."""

    keys: tuple[RolloutKey, ...]
    rollouts: tuple[Rollout, ...]
    batch: MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """Results of the passes before the update: this rank's packs of each mini-batch, and log-probs by key."""

    scored: tuple[ScoredGroup, ...]
    minibatches: tuple[tuple[Pack, ...], ...]
    old_logprobs: dict[RolloutKey, Tensor] | None  # [T] float32; None: from the update's forward
    ref_logprobs: dict[RolloutKey, Tensor] | None
    tap: HiddenTap | None  # to pass to the update
    metrics: dict[str, float]


class _RecordedLoss:
    """A LossFunction that keeps the policy log-probs of each micro-batch. Only the last pipeline stage calls it."""

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self.policy_logprobs: list[Tensor] = []  # [P] of each micro-batch, on the model's device

    def __call__(self, predicted: TokenLogprobs, batch: MicroBatch) -> LossResult:
        self.policy_logprobs.append(predicted.policy_logprobs.detach())
        return self._loss(predicted, batch)


class PolicyTrainer:
    """The algorithm over a PolicyModel: log-probs, advantages, clipped updates."""

    def __init__(
        self,
        model: PolicyModel,
        section: AlgorithmSection,
        *,
        groups: ProcessGroups,
        micro_batch_tokens: int,
        temperature: float,
        max_new_tokens: int,
        health: TrainingHealth | None = None,
    ) -> None:
        """`health` stops a run that trains wrongly. Without it, the numbers are only reported."""
        self.model = model
        self.section = section
        self.groups = groups
        self.micro_batch_tokens = micro_batch_tokens
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.health = health
        self.loss = PolicyLoss(section)

    @property
    def is_last_update_good(self) -> bool:
        """Return whether the newest update had finite numbers; True before the first update."""
        return self.health is None or self.health.num_bad == 0

    def infer_logprobs(
        self, scored: Sequence[ScoredGroup], tap: HiddenTap | None = None
    ) -> Inference:
        """Run forward-only passes over this rank's share: log-probs before the update and, if needed, of the reference.

        `tap` gets the policy's hidden states of that share, never the reference's. If the update is the policy's first pass,
        the tap is passed to the update instead.
        """
        minibatches = tuple(
            self._plan(scored, indices)
            for indices in split_evenly(len(scored), self.section.num_minibatches)
        )
        packs = [pack for minibatch in minibatches for pack in minibatch]
        batches = [pack.batch for pack in packs]
        old_logprobs = ref_logprobs = None
        metrics: dict[str, float] = {}
        if self.section.has_logprob_pass:
            predicted = self.model.infer_logprobs(batches, self.temperature, tap=tap)
            old_logprobs = _by_key(packs, [p.logprobs for p in predicted])
            difference = _engine_difference(packs, [p.policy_logprobs for p in predicted])
            metrics = self._compare_engines(difference, scored)
            tap = None
        if self.section.kl_coef:
            reference = self.model.infer_logprobs(batches, self.temperature, reference=True)
            ref_logprobs = _by_key(packs, [r.logprobs for r in reference])
        return Inference(
            scored=tuple(scored),
            minibatches=minibatches,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            tap=tap,
            metrics=metrics,
        )

    def update(self, inference: Inference) -> dict[str, float]:
        """Run num_epochs passes of num_minibatches optimizer steps; return metrics averaged over the batch.

        Raises UnhealthyTrainingError on all ranks if a check of `health` fails. The engines are compared before the first
        update.
        """
        advantages = self._advantages(inference)
        totals = dict.fromkeys((*self.loss.metric_names, "loss_count", "num_tokens"), 0.0)
        last: dict[str, float] = {}
        engines: dict[str, float] = {}
        num_skipped = 0
        grad_norms: list[float] = []
        recorded = _RecordedLoss(self.loss)
        loss_fn = recorded if inference.old_logprobs is None else self.loss
        for _ in range(self.section.num_epochs):
            for minibatch in inference.minibatches:
                batches = [self._with_targets(pack, inference, advantages) for pack in minibatch]
                sums = self.model.forward_backward(
                    batches, self.temperature, loss_fn, tap=inference.tap
                )
                sums["loss_count"] = float(sum(batch.loss_count for batch in batches))
                sums["num_tokens"] = float(sum(batch.loss_mask.sum() for batch in batches))
                for name, value in sums.items():
                    totals[name] += value
                if inference.old_logprobs is None:
                    engines = self._compare_in_update(inference, recorded.policy_logprobs)
                stats = self.model.optimizer_step()
                grad_norms.append(stats.grad_norm)
                num_skipped += stats.is_skipped
                last["actor/lr"] = stats.lr
        means = self._means(totals)
        if num_skipped and self.groups.world.is_first:
            log.warning(
                "step %d: %d of %d updates were skipped, gradient norm %s: weights and optimizer are unchanged",
                *(_step_of(inference.scored), num_skipped, len(grad_norms), grad_norms[-1]),
            )
        if self.health is not None:
            loss = means["actor/pg_loss"]
            self.health.check_updates(_step_of(inference.scored), grad_norms, loss)
        return {
            **means,
            **engines,
            **last,
            "actor/grad_norm": sum(grad_norms) / len(grad_norms),
            "actor/num_updates": float(len(grad_norms)),
            "actor/num_skipped_updates": float(num_skipped),
        }

    def _plan(self, scored: Sequence[ScoredGroup], indices: range) -> tuple[Pack, ...]:
        """Return this rank's packs of one mini-batch (the prompts `indices`)."""
        keyed = [((i, r.sample_index), r) for i in indices for r in scored[i].group.rollouts]
        mine = balance_by_tokens([r.num_tokens for _, r in keyed], self.groups.dp.size)[
            self.groups.dp.rank
        ]
        sizes = [keyed[i][1].num_tokens for i in mine]
        packs = []
        for pack in pack_by_tokens(sizes, self.micro_batch_tokens):
            keys, rollouts = zip(*(keyed[mine[i]] for i in pack), strict=True)
            packs.append(Pack(keys=keys, rollouts=rollouts, batch=pack_rollouts(rollouts)))
        return tuple(packs)

    def _with_targets(
        self, pack: Pack, inference: Inference, advantages: dict[RolloutKey, Tensor]
    ) -> MicroBatch:
        experiences = [
            Experience(
                rollout=rollout,
                advantages=advantages[key],
                old_logprobs=inference.old_logprobs[key] if inference.old_logprobs else None,
                ref_logprobs=inference.ref_logprobs[key] if inference.ref_logprobs else None,
            )
            for key, rollout in zip(pack.keys, pack.rollouts, strict=True)
        ]
        return attach_experiences(
            pack.batch, experiences, self.section.aggregation, self.max_new_tokens
        )

    def _advantages(self, inference: Inference) -> dict[RolloutKey, Tensor]:
        """Return the advantages of every rollout of the batch.

        KL in the reward needs the log-probs of other ranks, which takes one gather.
        """
        scored = inference.scored
        penalties = None
        if inference.ref_logprobs is not None and self.section.kl_placement == "reward":
            assert inference.old_logprobs is not None  # see AlgorithmSection.has_logprob_pass
            mine = {
                key: self.section.kl_coef
                * kl_estimate(self.section.kl_estimator, old, inference.ref_logprobs[key])
                for key, old in inference.old_logprobs.items()
            }
            everyones = {
                k: v for part in gather_objects(mine, self.groups.dp) for k, v in part.items()
            }
            penalties = [
                [everyones[(i, r.sample_index)] for r in s.group.rollouts]
                for i, s in enumerate(scored)
            ]
        computed = compute_advantages(
            self.section.advantage,
            [s.rewards for s in scored],
            [[r.token_ids.numel() for r in s.group.rollouts] for s in scored],
            penalties,
        )
        return {
            (i, rollout.sample_index): advantage
            for i, s in enumerate(scored)
            for rollout, advantage in zip(s.group.rollouts, computed[i], strict=True)
        }

    def _means(self, totals: dict[str, float]) -> dict[str, float]:
        sums = sum_metrics(totals, [self.groups.dp])
        loss_count, num_tokens = sums.pop("loss_count"), sums.pop("num_tokens")
        return {
            f"actor/{name}": value / (loss_count if name == "pg_loss" else num_tokens)
            for name, value in sums.items()
        }

    def _compare_in_update(
        self, inference: Inference, policy_logprobs: Sequence[Tensor]
    ) -> dict[str, float]:
        """Run `_compare_engines` on an update's forward pass, whose log-probs exist only on the last pipeline stage."""
        pp = self.groups.pp
        known = [logprobs_P.cpu() for logprobs_P in policy_logprobs]
        mine = _engine_difference(inference.minibatches[0], known) if pp.is_last else None
        difference = broadcast_object(mine, pp, source=pp.size - 1)
        return self._compare_engines(difference, inference.scored)

    def _compare_engines(
        self, difference: EngineDifference, scored: Sequence[ScoredGroup]
    ) -> dict[str, float]:
        """Measure the difference per token between the two engines' log-probs of the raw policy."""
        everyones = EngineDifference.over(gather_objects(difference, self.groups.dp))
        if self.health is not None:
            self.health.check_engines(_step_of(scored), everyones)
        return everyones.metrics()


def _step_of(scored: Sequence[ScoredGroup]) -> int:
    """Return the RL step, counted from 1. The policy version of the rollouts is the number of RL steps done before it."""
    return scored[0].group.rollouts[0].policy_version + 1


def _engine_difference(
    packs: Sequence[Pack], policy_logprobs: Sequence[Tensor]
) -> EngineDifference:
    theirs = _by_key(packs, policy_logprobs)
    pairs = [
        (theirs[key], rollout.policy_logprobs)
        for pack in packs
        for key, rollout in zip(pack.keys, pack.rollouts, strict=True)
    ]
    none = torch.empty(0)
    return EngineDifference.of(
        torch.cat([none, *(training_T for training_T, _ in pairs)]),
        torch.cat([none, *(rollout_T for _, rollout_T in pairs)]),
    )


def _by_key(packs: Sequence[Pack], values: Sequence[Tensor]) -> dict[RolloutKey, Tensor]:
    """Return response values [T] by rollout, from the packed predictions [P] of each pack."""
    return {
        key: values_P[where].clone()
        for pack, values_P in zip(packs, values, strict=True)
        for key, where in zip(pack.keys, response_slices(pack.rollouts), strict=True)
    }
