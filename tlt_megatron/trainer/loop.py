"""One RL step. `RLTrainer.train_step` follows the paper's figure, and each box of the figure is one
file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tlt_megatron.data.prompts import PromptSampler
from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.policy.interfaces import Tap
from tlt_megatron.policy.policy_trainer import Inference, Plan, PolicyTrainer
from tlt_megatron.rollout.batch_rules import BatchPlan, BatchRules
from tlt_megatron.rollout.open_responses import load_carried, save_carried
from tlt_megatron.rollout.rollout_worker import Collected, RolloutWorker
from tlt_megatron.runtime.rng import seed_everything
from tlt_megatron.saved_files import errors_named, read_json
from tlt_megatron.spot.lifecycle import DrafterLifecycle
from tlt_megatron.trainer.saving.manifest import engine_file, engine_files
from tlt_megatron.trainer.weight_sync import push_policy
from tlt_megatron.types import RolloutKey, SamplingParams, ScoredGroup

log = logging.getLogger(__name__)


class TrainedStep(NamedTuple):
    """The results of a step, for its report."""

    collected: Collected
    inference: Inference
    metrics: dict[str, float]  # from the updates
    differences: Mapping[RolloutKey, float]  # the engines' mean absolute log-prob differences


@dataclass(kw_only=True)
class RLTrainer:
    """Runs RL steps. Every method is a collective of all ranks."""

    rules: BatchRules  # which responses a step trains on
    sampling: SamplingParams
    engine_dtype: torch.dtype  # engines receive weights in it
    sampler: PromptSampler
    worker: RolloutWorker  # its engine holds the policy
    policy_trainer: PolicyTrainer
    drafter: DrafterLifecycle | None  # None without spot training
    refresh_steps: int = 0  # steps between refreshes of the reference; 0: it never changes
    step: int = field(default=0, init=False)  # RL steps done; also the version of the policy
    critic_from: int = field(default=0, init=False)  # the step at which the critic began, if any
    # responses that the last step left over (partial rollouts)
    carried: tuple[ScoredGroup, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.engine, self.phases = self.worker.engine, self.worker.phases
        self.world = self.worker.replicas

    def train_step(self) -> TrainedStep:
        """Run one RL step. GenerationStopped on all ranks, without a change, if one is told to
        stop.
        """
        seed_everything(self.sampling.seed, self.step + 1)
        collected = self._collect()  # prompts -> rollouts -> rewards
        self._publish_drafter(collected)
        self.engine.sleep()
        plan = self._plan(collected.groups)  # tokens go to the ranks that train on them
        tap = self.drafter.make_tap() if self.drafter else None
        inference = self._infer(plan, tap)  # values, log-probs
        learned = self._update_critic(inference) | self._update_policy(inference, tap)
        self.engine.wake()
        self.step, self.carried = self.step + 1, collected.carried
        pushed = self._push_policy()  # weights
        metrics = learned | pushed | {"training/epoch": float(self.sampler.epoch)}
        return TrainedStep(collected, inference, metrics, self.policy_trainer.engine_differences)

    def _collect(self) -> Collected:
        """Draw prompts and return their scored rollouts. GenerationStopped changes no state."""
        rules, before, draw = self.rules, self.sampler.state_dict(), self.sampler.next_batch
        if self.drafter is not None:
            self.drafter.start_step(self.step + 1)
        try:
            return self.worker.collect(
                draw(rules.num_first(self.carried)),
                self.sampling,
                policy_version=self.step,
                drafter=self.drafter,
                step=self.step + 1,
                plan=BatchPlan(rules=rules, draw=draw, carried=self.carried),
            )
        except GenerationStopped:
            self.sampler.load_state_dict(before)
            raise

    def _publish_drafter(self, collected: Collected) -> None:
        if self.drafter is not None:
            with self.phases("PUBLISH", "publish_drafter"):
                self.drafter.publish(collected.metrics)

    @property
    def _has_policy_update(self) -> bool:
        """Return False in a critic's first steps, in which only it learns."""
        critic = self.policy_trainer.critic
        return critic is None or self.step - self.critic_from >= critic.section.warmup_steps

    def _plan(self, scored: Sequence[ScoredGroup]) -> Plan:
        with self.phases("PLAN", "plan_batch"):
            return self.policy_trainer.plan(scored)

    def _infer(self, plan: Plan, tap: Tap | None) -> Inference:
        """Run the forward-only passes of critic, policy and reference."""
        trainer, values = self.policy_trainer, None
        if trainer.critic is not None:
            with self.phases("VALUES", "values"):
                values = trainer.infer_values(plan)
        with self.phases("LOGPROB", "old_log_prob"):
            has_update = self._has_policy_update
            return trainer.infer_logprobs(
                plan, tap, self.step, values=values, has_update=has_update
            )

    def _update_critic(self, inference: Inference) -> dict[str, float]:
        critic = self.policy_trainer.critic
        if critic is None:
            return {}
        critic.model.enter_device()
        with self.phases("CRITIC", "update_critic"):
            metrics = self.policy_trainer.update_critic(inference)
        critic.model.leave_device()
        return metrics

    def _update_policy(self, inference: Inference, tap: Tap | None) -> dict[str, float]:
        model = self.policy_trainer.model
        model.enter_device()
        with self.phases("UPDATE", "update_actor"):
            metrics = {}
            if self._has_policy_update:
                metrics = self.policy_trainer.update(inference, tap)
            if self.refresh_steps and (self.step + 1) % self.refresh_steps == 0:
                model.refresh_reference()
        model.leave_device()
        return metrics

    def _push_policy(self) -> dict[str, float]:
        """Load the policy of this step into every engine."""
        model, dtype = self.policy_trainer.model, self.engine_dtype
        with self.phases("SYNC", "update_weights", version=self.step):
            return push_policy(model, self.engine, self.step, dtype=dtype, world=self.world)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON types. The rest has files: see `save_into`."""
        return {
            "step": self.step,
            "critic_from": self.critic_from,
            "sampler": self.sampler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, has_critic: bool) -> None:
        """Restore what `state_dict` returned. `has_critic`: the critic goes on."""
        self.step = int(state["step"])
        self.critic_from = state.get("critic_from", 0) if has_critic else self.step
        self.sampler.load_state_dict(state["sampler"])

    def save_into(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint, besides the models: the engine's selector, the
        drafter and the carried responses.
        """
        text = json.dumps(self.engine.state_dict())
        engine_file(folder, self.world.rank).write_text(text, encoding="utf-8")
        if self.drafter is not None:
            self.drafter.save_into(folder)
        save_carried(folder, self.carried, self.world.rank)

    def load_from(self, folder: Path, *, with_drafter: bool) -> None:
        """Restore what `save_into` wrote, after `load_state_dict`. Without `with_drafter`, the
        drafter starts anew.
        """
        self._load_engine(folder)
        if self.drafter is not None and with_drafter:
            self.drafter.load_from(folder)
        carried = load_carried(folder, self.sampler.prompt_at, self.world)
        rules, num_samples = self.rules, self.sampling.num_samples
        self.carried = tuple(rules.still_fit(carried, num_samples=num_samples))
        if len(self.carried) < len(carried):
            log.warning(
                "%d of %d prompts with carried responses are dropped: they do not fit"
                " rollout.num_samples=%d, rollout.partial_rollout_tokens=%d and"
                " rollout.max_new_tokens=%d",
                *(len(carried) - len(self.carried), len(carried), num_samples),
                *(rules.round_tokens, rules.max_new_tokens),
            )

    def _load_engine(self, folder: Path) -> None:
        """Restore the state of this rank's engine if the number of ranks is the same."""
        files = engine_files(folder)
        if len(files) != self.world.size:
            return
        file = files[self.world.rank]
        try:
            with errors_named(file):
                self.engine.load_state_dict(read_json(file))
        except ValueError as error:  # another version of the selector wrote it
            log.warning("the strategy selector starts anew: its state does not fit: %s", error)
