"""A run: RL steps with evaluations and checkpoints between them, until the last step or a stop.
Built by build.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.rollout.evaluation import Evaluator
from tlt_megatron.rollout.gain import SpeculationGain, measure_gain
from tlt_megatron.runtime.collectives import agree_any
from tlt_megatron.trainer.answer_loss import LossEvaluator
from tlt_megatron.trainer.loop import RLTrainer
from tlt_megatron.trainer.saving.run_checkpoint import CheckpointManager
from tlt_megatron.trainer.step_report import RunReport

_GAIN_STEPS = 4  # batches that measure the speedup of speculation


@dataclass(kw_only=True)
class Run:
    """Trains, evaluates, saves, stops and resumes. Every method is a collective of all ranks."""

    config: RunConfig
    trainer: RLTrainer
    evaluator: Evaluator | LossEvaluator
    checkpoints: CheckpointManager
    report: RunReport
    is_saved: bool = False  # a checkpoint of this run holds the present state
    num_new_steps: int = field(default=0, init=False)  # since the start or the resume
    # stopped on request; a resumed run does the rest
    is_stopped: bool = field(default=False, init=False)

    def train(self) -> None:
        """Run from the current step to the last or to a stop request, and save a checkpoint.

        A stop drops unfinished rollouts: the policy has not changed in that step, so the checkpoint
        is the state at its beginning. A running update is finished first.
        """
        self.is_stopped = not self._run_steps()
        if self.is_stopped or self.config.run.num_steps:  # not after an evaluation alone
            self.save_checkpoint()

    def _run_steps(self) -> bool:
        """Return True after the last step, False after a stop request."""
        trainer = self.trainer
        try:
            self._evaluate_if_due()
            while trainer.step < self.config.run.num_steps:
                self.report.begin_step(trainer.step + 1)
                trained = trainer.train_step()
                self.num_new_steps += 1
                self.is_saved = False
                self.report.end_step(trainer.step, trained)
                if agree_any(trainer.worker.should_stop(), trainer.world):
                    return False
                self._evaluate_if_due()
                # checkpoints of steps without an update would replace the last good one
                is_good = trainer.policy_trainer.is_last_update_good
                if is_good and self._is_due(self.config.checkpoint.interval):
                    self.save_checkpoint()
        except GenerationStopped:  # on all ranks
            return False
        return True

    def _is_due(self, interval: int) -> bool:
        step = self.trainer.step
        return interval > 0 and step % interval == 0 and step < self.config.run.num_steps

    def _evaluate_if_due(self) -> None:
        """Evaluate at the first step, the last and the interval, unless done before a resume."""
        step = self.trainer.step
        is_end = step in (0, self.config.run.num_steps)
        is_done = self.report.last_eval_step == step
        if is_done or not (is_end or self._is_due(self.config.eval.interval)):
            return
        with self.trainer.phases("EVAL", "testing"):
            result = self.evaluator.evaluate(step)
        self.report.end_evaluation(step, result)
        if result:
            self.is_saved = False

    def save_checkpoint(self) -> None:
        """Save everything that a resumed run needs to equal an uninterrupted one, unless it is
        saved.
        """
        if self.is_saved:
            return
        trainer = self.trainer
        with trainer.phases("CHECKPOINT", "save_checkpoint"):
            state = trainer.state_dict() | {"report": self.report.state_dict()}
            self.report.sync()  # a checkpoint's steps must not be lost to a power cut
            self.checkpoints.save(trainer.step, state, save_part=trainer.save_into)
        self.is_saved = True

    def measure_gain(self) -> SpeculationGain | None:
        """Time further batches with and without speculation. Returns None after a run without new
        steps.
        """
        trainer = self.trainer
        sizes = [trainer.rules.num_first(())] * min(_GAIN_STEPS, self.num_new_steps)
        if not sizes:  # resumed after the last step
            return None
        draw, params = trainer.sampler.next_batch, trainer.sampling
        with trainer.phases("GAIN", "measure_gain"):
            return measure_gain(trainer.worker, sizes, draw, params, policy_version=trainer.step)
