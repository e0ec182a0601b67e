"""Evaluation of supervised training: the loss of held-out answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from tlt_megatron.policy.policy_trainer import PolicyTrainer
from tlt_megatron.rollout.rollout_worker import RolloutWorker
from tlt_megatron.types import Prompt, SamplingParams


@dataclass(kw_only=True)
class LossEvaluator:
    """Measures minus the mean log-prob of the answers' tokens."""

    worker: RolloutWorker
    trainer: PolicyTrainer
    data_sets: Mapping[str, Sequence[Prompt]]  # the rows of each file by its name
    params: SamplingParams
    left_out: Mapping[str, int] = field(default_factory=dict)  # rows that are too long, by file

    def evaluate(self, policy_version: int) -> dict[str, float]:
        """Return eval/loss, the mean over the data sets, {} without rows. A collective of all
        ranks.
        """
        found = {}
        for name, prompts in self.data_sets.items():
            groups = self.worker.collect(prompts, self.params, policy_version).groups
            found[name] = self.trainer.mean_loss(self.trainer.plan(groups))
        if not found:
            return {}
        by_name = {f"eval/{name}/loss": loss for name, loss in found.items() if len(found) > 1}
        return {"eval/loss": fmean(found.values())} | by_name
