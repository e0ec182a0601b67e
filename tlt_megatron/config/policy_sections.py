"""Sections for what is trained: the policy, its layout, loss, optimizer and Megatron options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from tlt_megatron.config.extensions import REGISTRY, named
from tlt_megatron.config.mcore_fields import check_transformer_fields
from tlt_megatron.config.ranges import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Unit,
    one_of,
)

# Log-probs of training and rollouts may differ by so much if algorithm.max_logprob_diff is null.
EXACT_DTYPES = ("float32", "float64")
MAX_DIFF_EXACT = 1e-3  # nats, worst token; measured with float32 engines on a 135M model: 5e-5
# nats, mean over tokens, if an engine uses bfloat16: its worst token may differ by 1
MEAN_DIFF_ROUNDED = 0.1
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection(Section):
    """The policy."""

    path: str = ""  # folder of a Hugging Face model (config.json, tokenizer, safetensors), or its id on the Hub
    # of its parameters; bfloat16 has float32 master weights
    dtype: Annotated[str, one_of("float32", "bfloat16")] = "float32"
    # LoRA, as in PEFT. 0: all weights are trained. Else W is frozen, and A and B have this rank
    lora_rank: NonNegativeInt = 0
    lora_alpha: Positive = 32.0  # W + lora_alpha / lora_rank * B A
    # linear layers that have adapters, by the last part of their Hugging Face names; default: all
    lora_targets: list[str] = field(default_factory=lambda: [*LORA_TARGETS])

    def check(self) -> None:
        targets = self.lora_targets
        is_known = 0 < len(set(targets)) == len(targets) and set(targets) <= set(LORA_TARGETS)
        names = f"different ones of {', '.join(LORA_TARGETS)}; for all-linear leave it out"
        self.require(is_known, "lora_targets", names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection(Section):
    """How the policy is split. The data-parallel size is world / (tensor * context * pipeline)."""

    tensor: PositiveInt = 1  # tensor-parallel ranks; above 1 also with sequence parallelism
    context: PositiveInt = 1  # context-parallel ranks: each has a share of every sequence's tokens
    pipeline: PositiveInt = 1  # pipeline stages
    # chunks of layers of a stage, whose passes are interleaved: a smaller bubble, more messages
    virtual_pipeline: PositiveInt = 1
    # ranks that share the experts of a layer, of tensor x context x data; an expert is never cut
    expert: PositiveInt = 1

    @property
    def virtual_size(self) -> int | None:
        """Return Megatron's virtual_pipeline_model_parallel_size; None: no interleaved passes."""
        return self.virtual_pipeline if self.virtual_pipeline > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection(Section):
    """How responses are scored."""

    # math | exact | environment | path/to/file.py:function | package.module:function, or several of
    # them with their weights in the reward, which is the weighted sum: {math: 1.0, exact: 0.2}.
    # environment: the sum of what an environment gives for turns and at its end. none: every reward
    # is 0, for algorithm.distill_coef; rows need no label then
    function: str | dict[str, float] = "math"
    # a score from which a response counts as right: in pass@k, maj@k and rollout/solve_all
    right_score: float = 1.0
    num_workers: PositiveInt = 1  # worker processes per rank
    timeout_s: Positive = 30.0  # for one response
    # raise: end the run, naming the prompt; zero: reward 0, counted
    on_error: Annotated[str, one_of("raise", "zero")] = "raise"
    # DAPO's soft punishment: the reward falls by up to overlong_penalty over the last
    # overlong_tokens before rollout.max_new_tokens; 0: off. Not in evaluations
    overlong_tokens: NonNegativeInt = 0
    overlong_penalty: NonNegative = 1.0  # what the longest response loses

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of every function by its setting."""
        return {self.function: 1.0} if isinstance(self.function, str) else self.function

    @property
    def names(self) -> list[str]:
        """Return the name of every function, without its place."""
        return [spec.rpartition(":")[2] for spec in self.weights]

    @property
    def is_none(self) -> bool:
        """Return whether nothing is scored."""
        return self.function == "none"

    @property
    def is_built_in(self) -> bool:
        """Return whether no function is the user's."""
        built_in = {*REGISTRY["reward.function"].built_in} - {"environment"}
        return self.weights.keys() <= built_in

    @property
    def numbers(self) -> list[str]:
        """Return the numbers that filter groups, besides those of the user's functions."""
        return ["score", "reward", *["acc"] * self.is_built_in]

    def may_return(self, number: str) -> bool:
        """Return whether results may have a further number of this name: the user's functions
        return any.
        """
        if list(self.weights.values()) == [1]:
            return not self.is_built_in
        name, _, further = number.partition("/")
        own = [spec for spec in self.weights if spec.rpartition(":")[2] == name]
        return bool(own) and (not further or ":" in own[0] or own == ["environment"])


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection(Section):
    """Advantage and policy loss."""

    # Each is a name, path/to/file.py:function or package.module:function.
    # grpo | dr_grpo | rloo | reinforce_plus_plus | reinforce_plus_plus_baseline | gae (with a
    # critic, section `critic`) | sft (supervised: imitates the answers of data.train; no engine
    # starts) | import path
    advantage: Annotated[str, named("algorithm.advantage")] = "grpo"
    # keywords that an advantage of yours gets besides `rewards`, such as {power: 0.5}
    advantage_args: dict[str, Any] = field(default_factory=dict)
    gamma: Fraction = 1.0  # gae, reinforce_plus_plus: discount of a reward per token
    lam: Unit = 1.0  # gae: 0 trusts the critic, 1 the rewards
    loss: Annotated[str, named("algorithm.loss")] = "ppo"  # ppo | gspo | cispo | import path
    # keywords that a loss of yours gets, such as {delta: 4.0}
    loss_args: dict[str, Any] = field(default_factory=dict)
    # ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_low: Fraction = 0.2
    clip_high: Positive = 0.2  # 0.28 in DAPO
    dual_clip: float = 0.0  # bound on ratio * |A| where A < 0; 0: off, else > 1
    # sequence_sum: summed over tokens / max_new_tokens
    aggregation: Annotated[str, one_of("token_mean", "sequence_mean", "sequence_sum")] = (
        "token_mean"
    )
    # responses cut at rollout.max_new_tokens have no part in the loss, only in the advantages
    mask_truncated: bool = False
    entropy_coef: float = 0.0  # > 0 rewards entropy
    kl_coef: NonNegative = 0.0  # times KL to the reference (section `reference`)
    kl_placement: Annotated[str, one_of("loss", "reward")] = "loss"  # where the KL is subtracted
    # auto: k1 in the reward, k3 in the loss. k1 needs kl_placement: reward
    kl_estimator: Annotated[str, one_of("k1", "k2", "k3", "auto")] = "auto"
    # on-policy distillation: this times log p - log q, of policy and reference, is subtracted from
    # the advantage of each token; with reward.function: none it is all that is learned
    distill_coef: NonNegative = 0.0
    tis_cap: float = 0.0  # truncated importance sampling: cap of train/rollout; 0: off, else >= 1
    # of one token, of the whole response, or the geometric mean over its tokens
    rollout_is: Annotated[str, one_of("token", "sequence", "geometric")] = "token"
    # no gradient where the ratio is outside the bounds
    rollout_rs: Annotated[str, one_of("none", "token", "sequence", "geometric")] = "none"
    # upper bound, > 1, whose reciprocal is the lower one; or [lower, upper]
    rollout_rs_threshold: float | list[float] = 2.0
    # DAPO's dynamic sampling: draw further prompts instead of groups whose responses do not differ
    # in this: score | reward (less the overlong punishment) | acc or another further number of the
    # reward function; none: off
    filter_groups: str = "none"
    max_num_gen_batches: PositiveInt = 10  # generation rounds per step, at most
    num_minibatches: PositiveInt = 1  # optimizer updates per pass over a batch of rollouts
    num_epochs: PositiveInt = 1  # passes over a batch of rollouts
    # nats, training to rollout at the first step; None: max 1e-3, mean 0.1 with bfloat16
    max_logprob_diff: float | None = None

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def is_sft(self) -> bool:
        """Return whether the policy imitates the answers of the data set."""
        return self.advantage == "sft"

    @property
    def has_correction(self) -> bool:
        """Return whether the loss is corrected for the rollout engine's distribution."""
        return self.tis_cap > 0 or self.rollout_rs != "none"

    @property
    def rollout_rs_bounds(self) -> tuple[float, float]:
        """Return the least and the largest ratio that is not masked."""
        bounds = self.rollout_rs_threshold
        lower, upper = bounds if isinstance(bounds, list) else (1 / bounds, bounds)
        return lower, upper

    @property
    def has_logprob_pass(self) -> bool:
        """Return whether log-probs are computed in a separate pass before the update.

        A batch's only update computes the same numbers; a KL penalty in the reward and a
        distillation need them earlier.
        """
        num_updates = self.num_epochs * self.num_minibatches
        is_first = num_updates == 1 and not self.has_kl_reward and self.distill_coef == 0
        return not (is_first or self.is_sft)

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0 or self.distill_coef > 0

    @property
    def has_kl_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_placement == "reward"

    @property
    def used_kl_estimator(self) -> str:
        """Return the estimator of KL: where it is auto, the one that fits the placement."""
        if self.kl_estimator != "auto":
            return self.kl_estimator
        return "k1" if self.kl_placement == "reward" else "k3"

    @property
    def can_skip(self) -> bool:
        """Return whether responses of zero advantage are skipped in the update, if the loss says
        that they have no gradient (`policy_loss.is_zero_without_advantage`).

        Entropy and the reference can give them a gradient, and a critic learns from all responses.
        Then all are computed.
        """
        return not (self.entropy_coef or self.has_reference or self.has_critic)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection(Section):
    """Adam with decoupled weight decay, and its learning-rate schedule (in optimizer steps)."""

    lr: Positive = 1e-6  # after warm-up
    min_lr: NonNegative = 0.0  # at the end of a decay
    warmup_steps: NonNegativeInt = 0  # lr rises linearly from 0
    # to min_lr at the end of the run; a resume with more steps stretches it
    decay: Annotated[str, one_of("constant", "linear", "cosine")] = "constant"
    weight_decay: NonNegative = 0.01  # not on norms and biases
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # decay of Adam's moments
    eps: Positive = 1e-8  # of Adam
    clip_grad: NonNegative = 1.0  # of the global gradient norm; 0: off


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSection(Section):
    """The frozen model of `algorithm.kl_coef` and `algorithm.distill_coef`."""

    # folder or Hub id of a model of any size with the policy's tokenizer; empty: the policy as it
    # was before training
    path: str = ""
    # RL steps after which the policy's weights replace the reference's, again and again; 0: never
    refresh_steps: NonNegativeInt = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection(Section):
    """The critic of `algorithm.advantage=gae`. Its other settings are those of the policy."""

    path: str = ""  # folder or Hub id of its initial weights; empty: model.path
    lr: Positive = 1e-5  # constant
    cliprange_value: Positive = 0.5  # values move by at most so much in the updates of a step
    warmup_steps: NonNegativeInt = 0  # first RL steps of a critic, in which only it learns

    def optimizer(self, policy: OptimizerSection) -> OptimizerSection:
        """Return the critic's optimizer: the policy's with a learning rate of its own, constant."""
        return replace(policy, lr=self.lr, min_lr=0.0, warmup_steps=0, decay="constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class McoreSection(Section):
    """Megatron-core. `transformer` goes unchanged to its TransformerConfig, after ours."""

    micro_batch_tokens: PositiveInt = 8192  # at most, in one pack; a longer sequence gets its own
    # activation recompute
    recompute: Annotated[str, one_of("none", "selective", "full")] = "none"
    # During rollouts gradient buffers are freed and, on a GPU, optimizer state and the frozen
    # weights of LoRA move to host memory
    offload_in_rollouts: bool = False
    transformer: dict[str, Any] = field(default_factory=dict)  # such as attention_softmax_in_fp32

    def check(self) -> None:
        check_transformer_fields(self.transformer)

    @property
    def moe_aux_loss_coeff(self) -> float:
        """Return the coefficient of the load-balancing loss of a mixture of experts; 0: off."""
        return self.transformer.get("moe_aux_loss_coeff", 0.0)

    @property
    def recompute_modules(self) -> list[str]:
        """Return the parts of a layer that are computed again in the backward pass."""
        if self.recompute != "selective":
            return []
        return self.transformer.get("recompute_modules", ["core_attn"])
