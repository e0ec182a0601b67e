"""The records that travel between the boxes of a step: prompt -> rollout -> experience -> micro-batch.

Imported by every package, imports none. All records are immutable values; tensors in them live on the CPU
unless the field says otherwise. Shape letters are those of the package map (README.md beside this file).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"  # a stop token was sampled; it is the last token of the response
    LENGTH = "length"  # max_new_tokens was reached


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to answer every prompt of one `generate` call.

    Example: `SamplingParams(num_samples=8, max_new_tokens=512, temperature=1.0, stop_token_ids=(2,), seed=7)`.
    `temperature=0` is greedy. `top_k=0` and `top_p=1.0` keep the whole vocabulary.
    """

    num_samples: int = 1  # G responses for each prompt
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0  # of the run; the noise of a request also depends on (draw_index, sample_index)

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"num_samples={self.num_samples}, max_new_tokens={self.max_new_tokens}: both must be >= 1"
            )
        if not 0.0 <= self.temperature <= 10.0:
            raise ValueError(f"temperature={self.temperature} is outside [0, 10]")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is negative (0 keeps all)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One drawn prompt, tokenized, with what its reward function needs.

    `prompt_id` names the row of the data set in reports. `draw_index` is the position in the run's stream of
    draws, unique in a run: it keys the sampling noise, so a prompt that comes again in a later epoch is
    answered afresh, while a rerun or a resume repeats every token.
    """

    prompt_id: str
    draw_index: int
    token_ids: tuple[int, ...]
    data_source: str = ""
    ground_truth: str = ""
    extra_info: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response. `logprobs` are of the distribution that was sampled (temperature, top-p, top-k applied),
    `policy_logprobs` of the raw policy (temperature 1, nothing cut)."""

    prompt_id: str
    draw_index: int
    sample_index: int  # 0..G-1 among its siblings
    prompt_ids: tuple[int, ...]
    token_ids: Tensor  # [T] int64, the response; includes the stop token
    logprobs: Tensor  # [T] float32
    policy_logprobs: Tensor  # [T] float32
    finish_reason: FinishReason
    policy_version: int
    accept_lengths: tuple[
        int, ...
    ] = ()  # tokens out per verify pass, bonus token included; () = plain

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + self.token_ids.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The G siblings of one prompt, in order of sample_index."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with the reward of each sibling; the unit that ranks exchange after the rollout phase."""

    group: RolloutGroup
    rewards: tuple[float, ...]  # one for each rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A rollout with all that the policy update needs. Token tensors align with `rollout.token_ids`."""

    rollout: Rollout
    advantages: Tensor  # [T] float32
    old_logprobs: (
        Tensor | None
    )  # [T] float32, training engine, before this batch's first update; None: see MicroBatch
    ref_logprobs: Tensor | None = None  # [T] float32, reference policy


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The packed tensors of one slot of the pipeline schedule.

    Sequences stand one after the other without padding. Everything at index p speaks of the prediction of
    `labels[p]` from the tokens up to p of the same sequence: a prompt of 2 tokens [a b] with the response
    [c d] gives token_ids [a b c d], labels [b c d 0], loss_mask [0 1 1 0].
    """

    token_ids: Tensor  # [P] int64
    labels: Tensor  # [P] int64
    position_ids: Tensor  # [P] int64, restart at 0 for each sequence
    cu_seqlens: Tensor  # [B+1] int32, 0 first, P last
    loss_mask: Tensor  # [P] float32, 1 where the label is a response token
    loss_weights: Tensor  # [P] float32, weight of the token in the summed loss; 0 outside the mask
    advantages: Tensor  # [P] float32
    old_logprobs: Tensor | None  # [P] float32; None: what the update itself computes, as constants
    rollout_logprobs: Tensor  # [P] float32, of the distribution that was sampled
    ref_logprobs: Tensor | None = None  # [P] float32
    loss_count: int = (
        0  # what the summed loss is divided by, this micro-batch's share (tokens or sequences)
    )

    @property
    def num_tokens(self) -> int:
        """P, all tokens of the micro-batch."""
        return self.token_ids.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """What a forward pass says of each label of a micro-batch."""

    logprobs: Tensor  # [P] float32, at the sampling temperature
    entropy: Tensor  # [P] float32, nats, at the sampling temperature
    policy_logprobs: (
        Tensor  # [P] float32, at temperature 1 (the same tensor as logprobs where that is 1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """A loss as an exact fraction, so that it does not depend on how a batch was cut.

    The gradient applied is d(sum of loss_sum over all micro-batches and data-parallel ranks)
    / (sum of count over the same).
    """

    loss_sum: Tensor  # scalar float32, differentiable
    count: int
    metrics: dict[str, Tensor]  # scalars, detached, to be summed over micro-batches and ranks


LossFunction = Callable[[TokenLogprobs, MicroBatch], LossResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStats:
    """What one optimizer step did."""

    grad_norm: float  # before clipping, over all parameters of all ranks
    lr: float
    is_skipped: bool  # a non-finite gradient: nothing was changed
