"""The RL loop. `train_step` follows the paper's figure, and each box of the figure is one file."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tlt_megatron.data.prompts import PromptSampler
from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.policy.policy_trainer import Inference, PolicyTrainer
from tlt_megatron.rewards.dapo import BatchPlan, BatchRules
from tlt_megatron.rewards.partial import save_carried
from tlt_megatron.runtime.collectives import agree_any, gather_objects
from tlt_megatron.runtime.rng import rng_state, set_rng_state
from tlt_megatron.spot.lifecycle import DrafterLifecycle
from tlt_megatron.trainer.evaluation import Evaluator
from tlt_megatron.trainer.gain import measure_gain
from tlt_megatron.trainer.identity import Resumed
from tlt_megatron.trainer.rollout_worker import Collected, RolloutWorker
from tlt_megatron.trainer.run_checkpoint import CheckpointManager, SavedRun
from tlt_megatron.trainer.step_report import RunReport
from tlt_megatron.trainer.weight_sync import push_policy
from tlt_megatron.types import Prompt, SamplingParams, ScoredGroup

log = logging.getLogger(__name__)

_GAIN_STEPS = 4  # steps that measure the speedup of speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Lengths and intervals, in RL steps, and how responses are drawn."""

    num_steps: int
    batch: BatchRules  # of a step
    eval_interval: int  # 0: only before the first step and after the last
    checkpoint_interval: int  # 0: only after the last step
    has_last_checkpoint: bool  # after the last step; a stop always saves
    sampling: SamplingParams
    engine_dtype: torch.dtype  # of the weights that engines receive


class RLTrainer:
    """Runs, evaluates, saves and stops. Every method is a collective of all ranks."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        sampler: PromptSampler,
        worker: RolloutWorker,
        policy_trainer: PolicyTrainer,
        evaluator: Evaluator,
        checkpoints: CheckpointManager,
        drafter: DrafterLifecycle | None,
        report: RunReport,
    ) -> None:
        """The engine of `worker` holds the policy. `drafter` is given only with spot training."""
        self.settings = settings
        self.sampler = sampler
        self.worker = worker
        self.engine = worker.engine
        self.phases = worker.phases
        self.world = worker.replicas
        self.policy_trainer = policy_trainer
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.drafter = drafter
        self.report = report
        self.step = 0  # RL steps done; also the version of the policy
        self.critic_from = 0  # the step at which the critic began, if there is one
        self.carried: tuple[ScoredGroup, ...] = ()  # left over by the last step (partial rollouts)
        # of the latest steps: prompts of each generation round
        self.last_rounds: deque[list[int]] = deque(maxlen=_GAIN_STEPS)
        self.is_stopped = False  # stopped on request; a resumed run does the rest
        self._is_saved = False  # a checkpoint of this run holds the present state

    def train(self) -> None:
        """Run from the current step to the last or to a stop request, and save a checkpoint.

        A stop drops unfinished rollouts: the policy has not changed in that step, so the checkpoint
        is the state at its beginning. A running update is finished first.
        """
        self.is_stopped = not self._run_steps()
        if self.is_stopped or self.settings.has_last_checkpoint:
            self.save_checkpoint()

    def _run_steps(self) -> bool:
        """Return True after the last step, False after a stop request."""
        try:
            self._evaluate_if_due()
            while self.step < self.settings.num_steps:
                self.train_step()
                if agree_any(self.worker.should_stop(), self.world):
                    return False
                self._evaluate_if_due()
                # checkpoints of steps without an update would replace the last good one
                if (
                    self._is_due(self.settings.checkpoint_interval)
                    and self.policy_trainer.is_last_update_good
                ):
                    self.save_checkpoint()
        except GenerationStopped:  # on all ranks
            return False
        return True

    def _evaluate_if_due(self) -> None:
        """Evaluate at the first step, the last and the interval, unless done before a resume."""
        is_end = self.step in (0, self.settings.num_steps)
        if self.report.history.last_eval_step != self.step and (
            is_end or self._is_due(self.settings.eval_interval)
        ):
            self.evaluate()

    def train_step(self) -> None:
        """Run one RL step: prompts, rollouts, rewards, drafter, log-probs, updates, weights."""
        self.report.begin_step(self.step + 1)
        collected = self._collect()
        self.carried = collected.carried
        if self.drafter is not None:
            with self.phases("PUBLISH", "publish_drafter"):
                self.drafter.publish(collected.metrics)
        self.engine.sleep()
        inference = self._infer(collected.groups)
        learned = self._update_critic(inference)
        self.policy_trainer.model.enter_device()
        with self.phases("UPDATE", "update_actor"):
            if self._has_policy_update:
                learned |= self.policy_trainer.update(inference)
        self.policy_trainer.model.leave_device()
        self.engine.wake()
        self.step, self._is_saved = self.step + 1, False
        self._push_policy()
        self.report.end_step(
            self.step,
            collected,
            inference,
            learned | {"training/epoch": float(self.sampler.epoch)},
            self.policy_trainer.engine_differences,
        )

    def _collect(self) -> Collected:
        """Draw prompts and return their scored rollouts. GenerationStopped changes no state."""
        rules, before = self.settings.batch, (self.sampler.state_dict(), rng_state())
        num_drawn: list[int] = []

        def draw(count: int) -> list[Prompt]:
            num_drawn.append(count)
            return self.sampler.next_batch(count) if count else []

        if self.drafter is not None:
            self.drafter.start_step(self.step + 1)
        try:
            collected = self.worker.collect(
                draw(rules.num_first(self.carried)),
                self.settings.sampling,
                policy_version=self.step,
                drafter=self.drafter,
                step=self.step + 1,
                plan=BatchPlan(rules=rules, draw=draw, carried=self.carried),
            )
        except GenerationStopped:
            self.sampler.load_state_dict(before[0])
            set_rng_state(before[1])
            raise
        self.last_rounds.append(num_drawn)
        return collected

    @property
    def _has_policy_update(self) -> bool:
        """Return False in a critic's first steps, in which only it learns."""
        critic = self.policy_trainer.critic
        return critic is None or self.step - self.critic_from >= critic.section.warmup_steps

    def _infer(self, scored: Sequence[ScoredGroup]) -> Inference:
        """Run the forward-only passes of critic, policy and reference."""
        values = None
        if self.policy_trainer.critic is not None:
            with self.phases("VALUES", "values"):
                values = self.policy_trainer.infer_values(scored)
        with self.phases("LOGPROB", "old_log_prob"):
            tap = self.drafter.make_tap() if self.drafter else None
            return self.policy_trainer.infer_logprobs(
                scored, tap, self.step, values=values, has_update=self._has_policy_update
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

    def _push_policy(self) -> None:
        """Load the policy of this step into every engine."""
        with self.phases("SYNC", "update_weights", version=self.step):
            push_policy(
                self.policy_trainer.model,
                self.engine,
                self.step,
                dtype=self.settings.engine_dtype,
                world=self.world,
            )

    def evaluate(self) -> None:
        """Measure the hold-out accuracy of the current policy and report it."""
        with self.phases("EVAL", "testing"):
            result = self.evaluator.evaluate(self.step)
        self.report.end_evaluation(self.step, result)
        if result:
            self._is_saved = False

    def save_checkpoint(self) -> None:
        """Save everything that a resumed run needs to equal an uninterrupted one, unless it is saved."""
        if self._is_saved:
            return
        with self.phases("CHECKPOINT", "save_checkpoint"):
            state = {
                "step": self.step,
                "critic_from": self.critic_from,
                "sampler": self.sampler.state_dict(),
                "rng": gather_objects(rng_state(), self.world),
                "engine": gather_objects(self.engine.state_dict(), self.world),
                "history": self.report.history.state_dict(),
                "written": self.report.num_written(),
            }
            self.report.sync()  # a checkpoint's steps must not be lost to a power cut

            def save_part(folder: Path) -> None:
                if self.drafter is not None:
                    self.drafter.save_into(folder)
                if self.carried and self.world.is_first:
                    save_carried(folder, self.carried)

            self.checkpoints.save(self.step, state, save_part=save_part)
        self._is_saved = True
        self.report.add_memory()

    def resume(
        self, saved: SavedRun, folder: Path, resumed: Resumed, carried: Sequence[ScoredGroup]
    ) -> None:
        """Restore what `save_checkpoint` wrote, except policy, sampler and drafter. `resumed`: learned parts."""
        state = saved.state
        self.step = saved.step
        self._is_saved = folder.resolve() == self.checkpoints.folder(saved.step).resolve()
        if self._is_saved:  # a fork has another run folder
            self.report.warn_of_loss(state.get("written", {}))
        has_critic = (folder / "critic").is_dir()
        self.critic_from = state.get("critic_from", 0) if has_critic else saved.step
        num_samples = self.settings.sampling.num_samples
        self.carried = tuple(self.settings.batch.still_fit(carried, num_samples=num_samples))
        if len(self.carried) < len(carried):
            log.warning(
                "%d of %d prompts with carried responses are dropped: they do not fit"
                " rollout.num_samples=%d, rollout.partial_rollout_tokens=%d and"
                " rollout.max_new_tokens=%d",
                *(len(carried) - len(self.carried), len(carried), num_samples),
                *(self.settings.batch.round_tokens, self.settings.batch.max_new_tokens),
            )
        self.report.history.load_state_dict(state["history"])
        if len(state["rng"]) == self.world.size:
            set_rng_state(state["rng"][self.world.rank])
        if resumed.has_selector:
            try:
                self.engine.load_state_dict(state["engine"][self.world.rank])
            except (ValueError, KeyError) as error:  # of another version of the selector
                log.warning("the strategy selector starts anew: its state does not fit: %r", error)

    def measure_gain(self) -> None:
        """Time as many prompts as the latest steps had, with and without speculation, for the summary."""
        sizes = [count for rounds in self.last_rounds for count in rounds if count]
        if not sizes:  # resumed after the last step
            return
        gain = measure_gain(
            self.engine,
            sizes,
            self.sampler.next_batch,
            self.settings.sampling,
            policy_version=self.step,
            replicas=self.world,
            should_stop=self.worker.should_stop,
        )
        if gain is not None:
            self.report.history.add_gain(gain)

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0 and self.step < self.settings.num_steps
