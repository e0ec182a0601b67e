"""Stops a run that trains wrongly without an error: engines that differ, numbers that are not
finite.

Used by the policy trainer, the weight sync and the launcher. Every check gets the same numbers on
all ranks, so all ranks stop at the same place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_megatron.config.policy_sections import EXACT_DTYPES, MAX_DIFF_EXACT, MEAN_DIFF_ROUNDED
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.types import OptimizerStats, Rollout

log = logging.getLogger(__name__)


class UnhealthyTrainingError(RuntimeError):
    """The run must stop on every rank. Names the step, what is wrong and what to check."""


@dataclass(frozen=True, slots=True)
class EngineDifference:
    """Absolute difference of training and rollout log-probs (nats) and probabilities. NaN stays
    NaN.
    """

    num_tokens: int
    sums: Tensor  # [3] float64: |log-prob|, |probability|, probability squared
    maxima: Tensor  # [2] float64: |log-prob|, |probability|

    @classmethod
    def of(cls, training_N: Tensor, rollout_N: Tensor) -> EngineDifference:
        """Compare N log-probs of the raw policy (temperature 1, no cut). N may be 0."""
        training_N, rollout_N = training_N.double(), rollout_N.double()
        differences_2N = torch.stack(
            [(training_N - rollout_N).abs(), (training_N.exp() - rollout_N.exp()).abs()]
        )
        return cls(
            training_N.numel(),
            torch.cat([differences_2N.sum(1), differences_2N[1].square().sum()[None]]),
            # a column of zeros, because N may be 0
            torch.nn.functional.pad(differences_2N, (0, 1)).amax(1),
        )

    @classmethod
    def of_newest(cls, training_T: Tensor, rollout: Rollout) -> EngineDifference:
        """Compare the tokens that the newest policy drew, the last ones of the response. Tokens of
        earlier policies differ in any case.
        """
        first = rollout.token_ids.numel() - rollout.versions[-1][1]
        return cls.of(
            rollout.generated(training_T)[first:],
            rollout.generated(rollout.policy_logprobs)[first:],
        )

    @classmethod
    def over(cls, parts: Sequence[EngineDifference]) -> EngineDifference:
        """Combine the tokens of all `parts`."""
        return cls(
            sum(part.num_tokens for part in parts),
            torch.stack([part.sums for part in parts]).sum(0),
            torch.stack([part.maxima for part in parts]).amax(0),  # NaN wins over a number
        )

    def to_tensor(self) -> Tensor:
        """Return its numbers, [6] float64. `from_tensor` reads them."""
        count = torch.tensor([self.num_tokens], dtype=torch.float64)
        return torch.cat([count, self.sums, self.maxima])

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> EngineDifference:
        return cls(int(numbers[0]), numbers[1:4], numbers[4:])

    @property
    def logprob_mean(self) -> float:
        return float(self.sums[0]) / self.num_tokens

    @property
    def logprob_max(self) -> float:
        return float(self.maxima[0])

    def metrics(self) -> dict[str, float]:
        """Return metrics under slime's name for log-probs and verl's names for probabilities."""
        prob_mean, square_mean = (self.sums[1:] / self.num_tokens).tolist()
        variance = square_mean - prob_mean**2
        return {
            "train/train_rollout_logprob_abs_diff": self.logprob_mean,
            "train/train_rollout_logprob_abs_diff_max": self.logprob_max,
            "training/rollout_probs_diff_mean": prob_mean,
            "training/rollout_probs_diff_max": float(self.maxima[1]),
            # rounding can make the variance negative; NaN is kept
            "training/rollout_probs_diff_std": 0.0 if variance < 0 else math.sqrt(variance),
        }


MAX_BAD_UPDATES = 3  # in a row; then the run ends


@dataclass(kw_only=True)
class UpdateHealth:
    """Ends a run after too many bad updates in a row, over RL steps."""

    updates: str  # what they are called in the error
    advice: str  # what to check
    num_bad: int = field(default=0, init=False)  # updates in a row

    def check_updates(
        self, step: int, stats: Sequence[OptimizerStats], loss: float, world: Group
    ) -> None:
        """Raise UnhealthyTrainingError after MAX_BAD_UPDATES bad updates in a row.

        `stats` are those of the step's updates, in order. The first rank logs those that were
        skipped.
        """
        grad_norm = stats[-1].grad_norm
        num_skipped = sum(each.is_skipped for each in stats)
        if num_skipped and world.is_first:
            log.warning(
                f"step {step}: {num_skipped} of {len(stats)} {self.updates} were skipped, gradient norm {grad_norm}:"
                " weights and optimizer are unchanged"
            )
        num_before = self.num_bad
        for each in stats:
            self.num_bad = self.num_bad + 1 if each.is_skipped else 0
        if not math.isfinite(loss) and self.num_bad == 0:
            self.num_bad = num_before + 1
        if self.num_bad >= MAX_BAD_UPDATES:
            raise UnhealthyTrainingError(
                f"step {step}: {self.num_bad} {self.updates} in a row were skipped or not finite: "
                f"gradient norm {grad_norm}, loss {loss}. "
                f"Check the rewards (critic/rewards/*), {self.advice}. The newest checkpoint is kept"
            )


@dataclass(kw_only=True)
class TrainingHealth(UpdateHealth):
    """The checks of the policy: engines at the first batch of a fresh or resumed run, and every
    update.

    `max_diff` replaces the default bound on the difference of the engines; None keeps the default.
    """

    max_diff: float | None
    dtypes: tuple[str, str]  # for training and for rollouts
    updates: str = "updates"
    advice: str = (
        "optimizer.lr and the log-probs of the batch (train/train_rollout_logprob_abs_diff)"
    )
    _is_compared: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._is_exact = all(dtype in EXACT_DTYPES for dtype in self.dtypes)
        default = MAX_DIFF_EXACT if self._is_exact else MEAN_DIFF_ROUNDED
        self._bound = default if self.max_diff is None else self.max_diff

    def check_engines(self, step: int, difference: EngineDifference) -> None:
        """Raise UnhealthyTrainingError if training and rollouts compute different policies.

        Only the first batch is checked, before its first update.
        """
        if self._is_compared:
            return
        self._is_compared = True
        worst = difference.logprob_max if self._is_exact else difference.logprob_mean
        if not worst <= self._bound:  # also true for NaN
            statistic = "max" if self._is_exact else "mean"
            raise UnhealthyTrainingError(
                f"step {step}: training and rollout log-probs of {difference.num_tokens} sampled tokens differ by "
                f"max {difference.logprob_max:.3g}, mean {difference.logprob_mean:.3g}; allowed is {statistic} "
                f"{self._bound:g} (model.dtype={self.dtypes[0]}, rollout.dtype={self.dtypes[1]}). The two engines "
                "compute different policies: check mcore.transformer, sglang.engine_args and config.json of model.path "
                "(rope, norm, biases, tied embeddings). algorithm.max_logprob_diff sets the bound. "
                "No update was applied in this step"
            )


def check_weights(version: int, nonfinite: Sequence[str]) -> None:
    """Raise UnhealthyTrainingError if weights of policy `version` are NaN or infinite.

    `nonfinite` holds, by rank, the name of such a weight, or "" for none.
    """
    named = [(rank, name) for rank, name in enumerate(nonfinite) if name]
    if named:
        rank, name = named[0]
        raise UnhealthyTrainingError(
            f"step {version}: weights of the policy are NaN or infinite, {name} first "
            f"(on {len(named)} of {len(nonfinite)} ranks, rank {rank} first). Check optimizer.lr, optimizer.clip_grad "
            "and actor/grad_norm of the last steps, or the model or checkpoint where no update was made. "
            "They are not saved; the newest checkpoint is kept"
        )
