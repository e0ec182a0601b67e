"""The records of an RL step: prompt -> rollout -> scored group -> micro-batch.

Every package may import this module; it imports none of them. Records are immutable, and their
tensors live on the CPU unless the field says otherwise. README.md in this directory defines the
shape letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tlt_megatron.stop_strings import StopStrings

if TYPE_CHECKING:
    from torch import Tensor

MIN_TEMPERATURE = 1e-5  # logits over a smaller one overflow float32
MIN_DRAFT_TOKENS = 3  # a shorter DraftSequence has no row
RolloutKey = tuple[int, int]  # (draw_index, sample_index), unique in a batch
Message = Mapping[str, object]  # in a chat: at least the texts role and content


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"  # the last token is a stop token, or completes a stop string
    LENGTH = "length"  # max_new_tokens was reached
    CUT = "cut"  # it has not ended: a later generation round continues it (partial rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings for all prompts of one `generate` call.

    Example: `SamplingParams(num_samples=8, max_new_tokens=512, temperature=1.0,
    stop_token_ids=(2,), seed=7)`. `temperature=0` is greedy. `top_k=0` and `top_p=1.0` keep the
    whole vocabulary.
    """

    num_samples: int = 1  # G responses per prompt
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: StopStrings | None = None  # also end a response; made by `Tokenizer.stop_strings`
    seed: int = 0  # the run's; a request's noise also depends on (draw_index, sample_index)

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"num_samples={self.num_samples}, max_new_tokens={self.max_new_tokens}: both must be >= 1"
            )
        if self.temperature and not MIN_TEMPERATURE <= self.temperature <= 10.0:
            raise ValueError(
                f"temperature={self.temperature}: must be 0 (greedy) or in [{MIN_TEMPERATURE}, 10]"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is negative (0 keeps all)")

    @property
    def distribution(self) -> tuple[float, float, int]:
        """Return what shapes the distribution: requests that share it are sampled together."""
        return self.temperature, self.top_p, self.top_k

    @property
    def is_cut(self) -> bool:
        """Whether top-p or top-k leaves out tokens."""
        return self.top_p < 1.0 or self.top_k > 0

    @property
    def is_plain(self) -> bool:
        """Whether tokens come from the raw logits: greedily, or at temperature 1 without a cut."""
        return self.temperature == 0.0 or (self.temperature == 1.0 and not self.is_cut)


class Answer(NamedTuple):
    """The right response to a prompt, of which a policy imitates the tokens in the mask."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]  # of token_ids: the turns of the assistant


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One drawn prompt: its tokens and the inputs of its reward function.

    `prompt_id` names the row of the data set in reports. `draw_index` counts the draws of a run and
    keys the sampling noise. So a prompt gets new responses in a later epoch, and a rerun or a
    resume repeats every token. A turn of a conversation is a prompt too, so `stop` can be its own.
    """

    prompt_id: str
    draw_index: int
    token_ids: tuple[int, ...]
    data_source: str = ""
    ground_truth: str = ""
    extra_info: Mapping[str, object] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()  # the chat; (): the prompt is plain text
    # for the chat template besides the messages: tools, enable_thinking, ...
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    answer: Answer | None = None  # for algorithm.advantage=sft
    # For a prompt that continues a response: `token_ids` end with what the response has so far.
    first_sample: int = 0  # sample_index of the first of its responses
    first_position: int = 0  # noise position of their first token: the tokens that they continue
    num_samples: int | None = None  # responses; None: as many as the call asks for
    max_new_tokens: int | None = None  # limit of each response; None: that of the call
    stop: StopStrings | None = None  # that end its responses; None: those of the call

    def sample_indices(self, params: SamplingParams) -> range:
        """Return the sample_index of each response in a call with `params`."""
        num_samples = params.num_samples if self.num_samples is None else self.num_samples
        return range(self.first_sample, self.first_sample + num_samples)

    def stop_in(self, params: SamplingParams) -> StopStrings | None:
        """Return the stop strings of a response in a call with `params`; None: there are none."""
        stop = params.stop if self.stop is None else self.stop
        return stop if stop is not None and stop.strings else None

    def limit(self, params: SamplingParams) -> int:
        """Return the most tokens of a response."""
        limit = params.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        assert 1 <= limit <= params.max_new_tokens, (self.prompt_id, limit)
        return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The token ids that top-p and top-k kept at each position, so that training uses the same
    sets.

    Example: token_ids [5, 9] and counts [2, 0]: the first token was drawn from {5, 9}. The second
    set was too large to be recorded (see `speculation.sampling.MAX_KEPT`), so training takes the
    whole vocabulary there.
    """

    token_ids: Tensor  # [K] int32, those of the first position first
    counts: Tensor  # int32, [T] of a response or [P] of a micro-batch; 0: the whole vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The messages of a conversation with an environment."""

    messages: tuple[Message, ...]  # prompt included
    num_turns: int  # the policy's
    has_failed: bool  # the environment failed: the conversation ended, and its reward is 0
    num_prompt_messages: int = 1  # those before the first turn, with those of the start
    # of an environment that is a class: its reward of each turn, and the score and the further
    # numbers of its end
    turn_rewards: tuple[float, ...] = ()
    end: Mapping[str, float] = field(default_factory=dict)


class TurnCredit(NamedTuple):
    """A turn of the policy in a conversation."""

    num_tokens: int  # that the policy drew
    reward: float  # the environment's, times its weight in the reward of the conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response, or one conversation with an environment.

    `logprobs` refer to the sampled distribution, after temperature, top-p and top-k.
    `policy_logprobs` refer to the raw policy: temperature 1, no cut. The tokens of a conversation
    are all turns of the policy with the observations between them. The last token is the policy's,
    and so is the first one, unless an environment has put messages before it.
    """

    prompt_id: str
    draw_index: int
    sample_index: int  # 0..G-1 among its siblings
    prompt_ids: tuple[int, ...]
    token_ids: Tensor  # [T] int64, the response; includes the stop token
    logprobs: Tensor  # [T] float32
    policy_logprobs: Tensor  # [T] float32
    finish_reason: FinishReason
    # (policy version, tokens that it drew), oldest first; observations count for the next turn
    versions: tuple[tuple[int, int], ...]
    # for each verify pass: the tokens before it, prompt included, and the tokens out of it, bonus
    # token included; () for plain decoding
    passes: tuple[tuple[int, int], ...] = ()
    kept: KeptTokens | None = None  # None: top-p and top-k are off
    # [T] bool, False on observation tokens, whose logprobs are 0; None: the policy drew all tokens
    loss_mask: Tensor | None = None
    transcript: Transcript | None = None  # None without an environment
    # [prompt + T - 1, L, K] int16, the K experts of each token in each of the L layers that have
    # experts; -1 where they are not known. None: rollout.routing_replay is off
    routes: Tensor | None = None
    num_observed: int = 0  # observation tokens, where `is_here` is False
    # of a conversation. The mask does not tell them apart where an observation is empty
    turns: tuple[TurnCredit, ...] = ()
    # last tokens of the row's prompt that the start of an environment replaced
    num_replaced: int = 0

    @property
    def key(self) -> RolloutKey:
        return self.draw_index, self.sample_index

    @property
    def accept_lengths(self) -> tuple[int, ...]:
        """Return the tokens out of each verify pass."""
        return tuple(count for _, count in self.passes)

    @property
    def is_here(self) -> bool:
        """Return False if another rank has the tokens: every tensor is on the meta device, with a
        length and no content, and there is no `loss_mask`.
        """
        return not self.token_ids.is_meta

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and response tokens."""
        return len(self.prompt_ids) + self.token_ids.numel()

    @property
    def num_generated(self) -> int:
        """Return the number of response tokens that the policy drew."""
        if self.loss_mask is None:
            return self.token_ids.numel() - self.num_observed
        return int(self.loss_mask.sum())

    def generated(self, values: Tensor) -> Tensor:
        """Return those of `values` [T] that belong to tokens of the policy."""
        return values if self.loss_mask is None else values[self.loss_mask]

    @property
    def policy_version(self) -> int:
        """Return the version of the policy that drew the last token."""
        return self.versions[-1][0]


class ScoredResponse(NamedTuple):
    """A response, or the part of it that one round generated, with its reward."""

    rollout: Rollout
    reward: float  # 0 while the response goes on
    details: Mapping[str, float]  # further numbers of the reward function


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSequence:
    """A prompt with its response and the policy's hidden states, for the training of a drafter.

    drafter/packing.py makes rows of it. The state at the last token is never used, because no token
    follows it, so it may be missing.
    """

    token_ids: Tensor  # [T] int64
    # [T or T-1, D] after the final norm (EAGLE, HASS), or [.., 3D] low, middle, high (EAGLE-3)
    features: Tensor
    final_hidden: Tensor | None = None  # [T or T-1, D] after the final norm; None: `features`
    loss_start: int = 0  # first token whose prediction is trained, usually the response's first
    # [T] bool, False on observations, which are context alone; None: there are none
    loss_mask: Tensor | None = None
    # (draw_index, sample_index, noise position of token `loss_start`), which key its noise; None:
    # not known
    request: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        num_tokens = self.token_ids.numel()
        for name in ("features", "final_hidden"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[0] not in (num_tokens, num_tokens - 1):
                raise ValueError(
                    f"{name} has {tensor.shape[0]} rows for {num_tokens} tokens: must be as many or one less"
                )

    def window(self, start: int, num_rows: int) -> DraftSequence:
        """Return these rows as a sequence of its own, which attends to nothing before `start`."""
        states = slice(start, start + num_rows + 1)
        tokens = slice(start, start + num_rows + MIN_DRAFT_TOKENS - 1)
        hidden, mask = self.final_hidden, self.loss_mask
        return DraftSequence(
            token_ids=self.token_ids[tokens],
            features=self.features[states],
            final_hidden=None if hidden is None else hidden[states],
            loss_start=max(0, self.loss_start - start),
            loss_mask=None if mask is None else mask[tokens],
        )

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the sequence in a batch."""
        return max(0, self.token_ids.numel() - MIN_DRAFT_TOKENS + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The G responses to one prompt, in order of sample_index."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup(RolloutGroup):
    """A group with the reward of each response."""

    rewards: tuple[float, ...]  # one per rollout
    # further numbers of the reward function by name, one per rollout; () without any
    details: tuple[Mapping[str, float], ...] = ()
    # soft overlong punishments, which `rewards` contain, one per rollout; () without any
    punishments: tuple[float, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Return whether all responses have ended. One that has not has reward 0 so far."""
        return all(r.finish_reason is not FinishReason.CUT for r in self.rollouts)


class CriticTargets(NamedTuple):
    """What the critic's loss needs of each label."""

    old_values: Tensor  # [P] float32, of the critic before its update
    returns: Tensor  # [P] float32, which the critic learns to predict


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The packed tensors of one micro-batch of the pipeline schedule.

    Sequences follow each other without padding. Index p of every tensor describes the prediction of
    `labels[p]` from the tokens of the same sequence up to p. Example: prompt [a b] and response [c
    d] give token_ids [a b c d], labels [b c d 0] and loss_mask [0 1 1 0].
    """

    token_ids: Tensor  # [P] int64
    labels: Tensor  # [P] int64
    position_ids: Tensor  # [P] int64, from 0 in each sequence
    cu_seqlens: Tensor  # [B+1] int32, 0 first, P last
    loss_mask: Tensor  # [P] float32, 1 where the label is a response token
    loss_weights: Tensor  # [P] float32, weight of a token in the summed loss; 0 outside the mask
    advantages: Tensor  # [P] float32
    old_logprobs: Tensor | None  # [P] float32; None: use the update's own logprobs, detached
    rollout_logprobs: Tensor  # [P] float32, of the sampled distribution
    ref_logprobs: Tensor | None = None  # [P] float32
    kept: KeptTokens | None = None  # log-probs and entropy are of these tokens; None: of all
    routes: Tensor | None = None  # [P, L, K] int16, as in Rollout; -1 at the end of a sequence
    critic: CriticTargets | None = None  # for the critic's loss
    loss_count: int = 0  # this micro-batch's share of the loss divisor (tokens or sequences)
    requests: tuple[RolloutKey, ...] = ()  # the response of each sequence

    @property
    def num_tokens(self) -> int:
        """Return P, the number of tokens."""
        return self.token_ids.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """What a forward pass returns for each label of a micro-batch; 0 where `loss_mask` is 0.

    The sampled distribution has the sampling temperature, over the kept tokens of the micro-batch.
    """

    logprobs: Tensor  # [P] float32, of the sampled distribution
    entropy: Tensor  # [P] float32, nats, of the sampled distribution
    policy_logprobs: Tensor  # [P] float32, of the raw policy: temperature 1, no cut; no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What a forward pass of the critic returns for each label; 0 where `loss_mask` is 0."""

    values: Tensor  # [P] float32, the expected return before the label is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """A loss as numerator and denominator, so that the split into micro-batches does not change it.

    The applied gradient is d(sum of loss_sum) / (sum of count). Both sums run over all
    micro-batches and data-parallel ranks.
    """

    loss_sum: Tensor  # scalar float32, differentiable
    count: int
    metrics: dict[str, Tensor]  # detached scalars, summed over micro-batches and ranks


LossFunction = Callable[[TokenLogprobs, MicroBatch], LossResult]
ValueLossFunction = Callable[[TokenValues, MicroBatch], LossResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStats:
    """Result of one optimizer step."""

    grad_norm: float  # before clipping, over all parameters of all ranks
    lr: float
    is_skipped: bool  # the gradient was not finite; no parameter changed
