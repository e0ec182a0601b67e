"""Turns one batch of scored rollouts into an updated policy.

Every rank knows the length and reward of every response and plans the batch from them. It gets the
tokens of its share alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.advantages import (
    advantage_metrics,
    compute_advantages,
    distill,
    zero_advantages,
)
from tlt_megatron.policy.batching import (
    Minibatch,
    Pack,
    attach_targets,
    by_key,
    find_owners,
    is_masked,
    make_minibatch,
    pack_share,
    split_evenly,
)
from tlt_megatron.policy.critic import CriticTrainer, value_metrics
from tlt_megatron.policy.exchange import fetch_tokens
from tlt_megatron.policy.health import EngineDifference, TrainingHealth
from tlt_megatron.policy.interfaces import PolicyModel, Tap
from tlt_megatron.policy.policy_loss import is_zero_without_advantage, kl_estimate, policy_loss
from tlt_megatron.runtime.collectives import (
    broadcast_bytes,
    gather_json,
    gather_tensor,
    sum_metrics,
)
from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.types import (
    LossResult,
    MicroBatch,
    OptimizerStats,
    Rollout,
    RolloutKey,
    ScoredGroup,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A batch, and what this rank computes of it."""

    scored: tuple[ScoredGroup, ...]  # the batch, with the tokens of this rank's share
    skipped: frozenset[RolloutKey]  # on all ranks
    minibatches: tuple[Minibatch, ...]

    @property
    def packs(self) -> list[Pack]:
        """Return the micro-batches of all mini-batches."""
        return [pack for minibatch in self.minibatches for pack in minibatch.packs]

    @property
    def own_skipped(self) -> list[Rollout]:
        """Return the skipped responses of this rank's share."""
        return [rollout for minibatch in self.minibatches for rollout in minibatch.skipped]

    @property
    def own(self) -> list[Rollout]:
        """Return the responses of this rank's share, whose tokens it has."""
        return [rollout for pack in self.packs for rollout in pack.rollouts] + self.own_skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """Results of the passes before the update; those of responses are [T] by response of this
    rank's share.
    """

    version: int  # the policy before the update: RL steps done
    plan: Plan
    advantages: Mapping[RolloutKey, Tensor]
    old_logprobs: Mapping[RolloutKey, Tensor] | None  # float32; None: from the update's own pass
    ref_logprobs: Mapping[RolloutKey, Tensor] | None
    values: Mapping[RolloutKey, Tensor] | None  # float32; with a critic
    returns: Mapping[RolloutKey, Tensor] | None
    metrics: dict[str, float]


@dataclass(kw_only=True)
class PolicyTrainer:
    """The algorithm over a PolicyModel: log-probs, advantages, clipped updates."""

    model: PolicyModel
    section: AlgorithmSection
    groups: ProcessGroups
    micro_batch_tokens: int
    temperature: float
    max_new_tokens: int
    health: TrainingHealth
    # None without `section.has_critic`, and in a run without steps
    critic: CriticTrainer | None = None
    # By response, the mean absolute difference of the two engines' log-probs. It holds the
    # responses of this rank's share of the newest batch that had a pass.
    engine_differences: dict[RolloutKey, float] = field(default_factory=dict, init=False)

    @property
    def is_last_update_good(self) -> bool:
        """Return whether the newest updates, of policy and critic, had finite numbers; True before
        the first update."""
        is_critic_good = self.critic is None or self.critic.is_last_update_good
        return is_critic_good and self.health.num_bad == 0

    def infer_values(self, plan: Plan) -> dict[RolloutKey, Tensor]:
        """Return the critic's values [T] of every response of this rank's share."""
        assert self.critic is not None
        packs = plan.packs
        predicted = self.critic.model.infer_values([pack.batch for pack in packs])
        return by_key(packs, [each.values for each in predicted])

    def infer_logprobs(
        self,
        plan: Plan,
        tap: Tap | None = None,
        version: int = 0,
        *,
        values: dict[RolloutKey, Tensor] | None = None,
        has_update: bool = True,
    ) -> Inference:
        """Run the forward-only passes of policy and reference that the update needs.

        `tap` gets the policy's hidden states of this rank's share, never the reference's. If the
        update is the policy's first pass, `update` records there. Then a pass here gives the tap
        the long tail of what the update skips, if the tap may run extra forward passes.
        `version` is the policy's: RL steps done. `values` are those of the critic, if there is one.
        Without `has_update`, `update` will not be called.
        """
        section, dp, own, packs = self.section, self.groups.dp, plan.own, plan.packs
        old_logprobs = ref_logprobs = None
        metrics: dict[str, float] = {}
        if section.has_logprob_pass or not has_update:
            packs += pack_share(plan.own_skipped, self.micro_batch_tokens)
            batches = [pack.batch for pack in packs]
            predicted = self.model.infer_logprobs(batches, self.temperature, tap=tap)
            old_logprobs = by_key(packs, [p.logprobs for p in predicted])
            known = [p.policy_logprobs for p in predicted]
            metrics = self._compare_engines(packs, known, version)
        elif tap is not None and plan.skipped:
            self._tap_skipped(plan.minibatches[0], tap)  # one update: one mini-batch
        if section.has_reference:
            batches = [pack.batch for pack in packs]
            reference = self.model.infer_logprobs(batches, self.temperature, reference=True)
            ref_logprobs = by_key(packs, [r.logprobs for r in reference])
        penalties = {}
        if section.has_kl_reward:
            penalties = self._kl_penalties(old_logprobs, ref_logprobs)
        advantages, returns = compute_advantages(plan.scored, section, own, penalties, values, dp)
        if section.distill_coef:
            assert old_logprobs is not None
            assert ref_logprobs is not None
            coef = section.distill_coef
            advantages, found = distill(own, advantages, old_logprobs, ref_logprobs, coef, dp)
            metrics |= found
        return Inference(
            version=version,
            plan=plan,
            advantages=advantages,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            values=values,
            returns=returns,
            metrics=metrics | advantage_metrics(own, advantages, returns, dp),
        )

    def update_critic(self, inference: Inference) -> dict[str, float]:
        """Run the critic's optimizer steps, over the mini-batches of `update`; return metrics."""
        assert self.critic is not None
        assert inference.values is not None
        assert inference.returns is not None
        plan = inference.plan
        metrics = value_metrics(plan.own, inference.values, inference.returns, self.groups.dp)
        minibatches = [self._attach(inference, each.packs) for each in plan.minibatches]
        step = inference.version + 1
        return metrics | self.critic.update(step, minibatches * self.section.num_epochs)

    def update(self, inference: Inference, tap: Tap | None = None) -> dict[str, float]:
        """Run num_epochs passes of num_minibatches optimizer steps; return metrics of the batch.

        `tap` as given to `infer_logprobs`: it records here if this is the policy's first pass.
        The metrics of tokens are means over the responses that were not skipped. Raises
        UnhealthyTrainingError on all ranks if a check of `health` fails. The engines are compared
        before the first update.
        """
        sums: dict[str, float] = defaultdict(float)
        engines: dict[str, float] = {}
        stats: list[OptimizerStats] = []
        if inference.old_logprobs is not None:
            tap = None  # it has recorded the pass before the update
        for minibatch in inference.plan.minibatches * self.section.num_epochs:
            found, known = self._run_passes(inference, minibatch.packs, tap)
            if inference.old_logprobs is None:  # then there is one update
                engines = self._compare_engines(minibatch.packs, known, inference.version)
            skipped_count = minibatch.skipped_count if self.groups.dp.is_first else 0
            found["loss_count"] += skipped_count
            for name, value in found.items():
                sums[name] += value
            stats.append(self.model.optimizer_step(skipped_count))
        means = self._means(sums)
        loss = means["actor/pg_loss"]
        self.health.check_updates(inference.version + 1, stats, loss, self.groups.world)
        return {
            **means,
            **engines,
            "actor/lr": stats[-1].lr,
            "actor/grad_norm": sum(each.grad_norm for each in stats) / len(stats),
            "actor/num_updates": float(len(stats)),
            "actor/num_skipped_updates": float(sum(each.is_skipped for each in stats)),
            "actor/skipped_response_share": len(inference.plan.skipped)
            / sum(len(each.rollouts) for each in inference.plan.scored),
        }

    def mean_loss(self, plan: Plan) -> float:
        """Return minus the mean log-prob of the batch's tokens that a loss counts. A collective."""
        packs = [*plan.packs, *pack_share(plan.own_skipped, self.micro_batch_tokens)]
        predicted = self.model.infer_logprobs([pack.batch for pack in packs], self.temperature)
        pairs = [(each.logprobs, pack.batch) for pack, each in zip(packs, predicted, strict=True)]
        sums = {
            "loss": -sum(float((logs.double() * batch.loss_mask).sum()) for logs, batch in pairs),
            "tokens": sum(float(batch.loss_mask.sum()) for _, batch in pairs),
        }
        total = sum_metrics(sums, self.groups.dp)
        return total["loss"] / total["tokens"]

    def _attach(self, inference: Inference, packs: Sequence[Pack]) -> list[MicroBatch]:
        """Return the micro-batches of `packs` with what the losses need."""
        targets = {
            "advantages": inference.advantages,
            "old_logprobs": inference.old_logprobs,
            "ref_logprobs": inference.ref_logprobs,
            "old_values": inference.values,
            "returns": inference.returns,
        }
        return [attach_targets(pack, targets, self.section, self.max_new_tokens) for pack in packs]

    def _run_passes(
        self, inference: Inference, packs: Sequence[Pack], tap: Tap | None
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Accumulate the gradients of `packs`; return metric sums and, on the last stage, the
        policy log-probs [P] of each micro-batch.
        """
        recorded: list[Tensor] = []

        def loss_fn(predicted: TokenLogprobs, batch: MicroBatch) -> LossResult:
            recorded.append(predicted.policy_logprobs)
            return policy_loss(predicted, batch, self.section)

        batches = self._attach(inference, packs)
        sums = self.model.forward_backward(batches, self.temperature, loss_fn, tap=tap)
        sums["loss_count"] = float(sum(batch.loss_count for batch in batches))
        sums["num_tokens"] = float(sum(batch.loss_mask.sum() for batch in batches))
        return sums, recorded

    def _indices(self, scored: Sequence[ScoredGroup]) -> list[range]:
        """Return the indices of the prompts of each mini-batch."""
        return split_evenly(len(scored), self.section.num_minibatches)

    def plan(self, batch: Sequence[ScoredGroup]) -> Plan:
        """Return the plan of a batch, with the tokens of this rank's share. A collective."""
        section, dp = self.section, self.groups.dp
        skipped: frozenset[RolloutKey] = frozenset()
        if section.can_skip and is_zero_without_advantage(section.loss):
            # then advantages need no pass
            skipped = self._choose_skipped(batch, zero_advantages(batch, section, dp))

        def minibatches(scored: Sequence[ScoredGroup]) -> list[list[Rollout]]:
            parts = self._indices(scored)
            return [[r for i in part for r in scored[i].rollouts] for part in parts]

        owners: dict[RolloutKey, int] = {}
        for rollouts in minibatches(batch):
            owners |= find_owners(rollouts, skipped, dp)
        scored = fetch_tokens(batch, owners, self.groups)
        return Plan(
            scored=scored,
            skipped=skipped,
            minibatches=tuple(
                make_minibatch(rollouts, skipped, owners, dp, section, self.micro_batch_tokens)
                for rollouts in minibatches(scored)
            ),
        )

    def _choose_skipped(
        self, scored: Sequence[ScoredGroup], zeros: set[RolloutKey]
    ) -> frozenset[RolloutKey]:
        """Return `zeros`, the responses of zero advantage, and masked ones, which take no pass in
        the update.

        If a mini-batch has no others, the first response to each prompt is computed, for metrics
        and the comparison of the engines. Rank 0 decides, because advantages of another machine may
        differ by rounding, and all ranks must run the same micro-batches.
        """
        rollouts = [rollout for each in scored for rollout in each.rollouts]
        zeros |= {r.key for r in rollouts if is_masked(r, self.section)}
        for indices in self._indices(scored):
            groups = [scored[i].rollouts for i in indices]
            if zeros.issuperset(rollout.key for group in groups for rollout in group):
                zeros -= {group[0].key for group in groups}
        keys = [rollout.key for rollout in rollouts]
        flags = broadcast_bytes(bytes(key in zeros for key in keys), self.groups.world)
        return frozenset(key for key, flag in zip(keys, flags, strict=True) if flag)

    def _tap_skipped(self, minibatch: Minibatch, tap: Tap) -> None:
        """Run the skipped responses forward that belong to the long tail of this rank's share."""
        rollouts = [r for pack in minibatch.packs for r in pack.rollouts]
        first = len(rollouts)
        rollouts += minibatch.skipped
        chosen = sorted(tap.choose([r.num_tokens for r in rollouts], self.groups))
        packs = pack_share([rollouts[i] for i in chosen if i >= first], self.micro_batch_tokens)
        self.model.infer_logprobs([pack.batch for pack in packs], self.temperature, tap=tap)

    def _kl_penalties(
        self,
        old_logprobs: dict[RolloutKey, Tensor] | None,
        ref_logprobs: dict[RolloutKey, Tensor] | None,
    ) -> dict[RolloutKey, Tensor]:
        """Return the KL penalty [T] of every rollout of this rank's share."""
        assert old_logprobs is not None  # see AlgorithmSection.has_logprob_pass
        assert ref_logprobs is not None
        return {
            key: self.section.kl_coef
            * kl_estimate(self.section.used_kl_estimator, old, ref_logprobs[key])
            for key, old in old_logprobs.items()
        }

    def _means(self, totals: dict[str, float]) -> dict[str, float]:
        sums = sum_metrics(totals, self.groups.dp)
        loss_count, num_tokens = sums.pop("loss_count"), sums.pop("num_tokens")
        return {
            name if "/" in name else f"actor/{name}": value
            / (max(loss_count, 1) if name == "pg_loss" else num_tokens)  # 0: all are masked
            for name, value in sums.items()
        }

    def _compare_engines(
        self, packs: Sequence[Pack], policy_logprobs: Sequence[Tensor], version: int
    ) -> dict[str, float]:
        """Measure the difference per token between the two engines' log-probs of the raw policy.

        `policy_logprobs` are [P] of each pack of this rank's share, at least on the last pipeline
        stage. Only tokens that the policy of `version` drew are compared.
        """
        none, pp = torch.empty(0), self.groups.pp  # a rank may have no response
        differences: dict[RolloutKey, EngineDifference] = {}
        if pp.is_last:
            training = by_key(packs, [each.cpu() for each in policy_logprobs])
            differences = {
                key: EngineDifference.of_newest(training[key], rollout)
                for pack in packs
                for key, rollout in zip(pack.keys, pack.rollouts, strict=True)
                if rollout.policy_version == version
            }
        mine = EngineDifference.over([EngineDifference.of(none, none), *differences.values()])
        means = [[*key, each.logprob_mean] for key, each in differences.items()]
        newest = gather_json(means, pp)[-1]
        self.engine_differences = {(draw, sample): mean for draw, sample, mean in newest}
        of_last_stage = gather_tensor(mine.to_tensor(), pp)[-1]
        shares = gather_tensor(of_last_stage, self.groups.dp)
        whole = EngineDifference.over([EngineDifference.from_tensor(each) for each in shares])
        if whole.num_tokens == 0:  # all are of earlier policies (partial rollouts)
            return {}
        self.health.check_engines(version + 1, whole)
        return whole.metrics()
