"""Sections for what is trained: the policy, its layout over the ranks, its loss, its optimizer and Megatron options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tlt_megatron.config.extensions import check_extension
from tlt_megatron.config.mcore_fields import check_transformer_fields
from tlt_megatron.config.ranges import one_of, require


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The policy."""

    path: str = ""  # folder of a Hugging Face model: config.json, tokenizer, safetensors
    dtype: str = "float32"  # of its parameters: float32 | bfloat16 (with fp32 master weights)

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """How the policy is split over the ranks. The data-parallel size is world / (tensor * pipeline)."""

    tensor: int = 1  # tensor-parallel ranks, >= 1
    pipeline: int = 1  # pipeline stages, >= 1
    sequence: bool = False  # sequence parallelism; needs tensor > 1

    def __post_init__(self) -> None:
        require(self.tensor >= 1, "parallel.tensor", self.tensor, ">= 1")
        require(self.pipeline >= 1, "parallel.pipeline", self.pipeline, ">= 1")
        require(
            not self.sequence or self.tensor > 1,
            "parallel.sequence",
            self.sequence,
            "false where parallel.tensor is 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """Advantage and policy loss."""

    # A name, or path/to/file.py:function, or package.module:function.
    advantage: str = "grpo"  # grpo | dr_grpo | rloo | reinforce_plus_plus | import path
    loss: str = "ppo"  # ppo | gspo | cispo | import path
    clip_low: float = 0.2  # ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float = 0.0  # bound on ratio * |A| where A < 0; 0: off, else > 1
    aggregation: str = "token_mean"  # token_mean | sequence_mean | sequence_sum (summed over tokens / max_new_tokens)
    entropy_coef: float = 0.0  # > 0 rewards entropy
    kl_coef: float = 0.0  # 0: no reference policy
    kl_placement: str = "loss"  # loss | reward
    kl_estimator: str = "k3"  # k1 | k2 | k3
    tis_cap: float = 0.0  # truncated importance sampling: cap of train/rollout; 0: off, else >= 1
    num_minibatches: int = 1  # optimizer updates per pass over a batch of rollouts
    num_epochs: int = 1  # passes over a batch of rollouts
    recompute_log_probs: str = "auto"  # before the update: auto (skipped if redundant) | always
    max_logprob_diff: float | None = (
        None  # nats, training to rollout at the first step; None: max 1e-3, mean 0.1 with bfloat16
    )

    def __post_init__(self) -> None:
        check_extension("algorithm.advantage", self.advantage)
        check_extension("algorithm.loss", self.loss)
        one_of(
            "algorithm.aggregation",
            self.aggregation,
            ("token_mean", "sequence_mean", "sequence_sum"),
        )
        one_of("algorithm.kl_placement", self.kl_placement, ("loss", "reward"))
        one_of("algorithm.recompute_log_probs", self.recompute_log_probs, ("auto", "always"))
        one_of("algorithm.kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        require(
            self.kl_estimator != "k1" or self.kl_placement == "reward",
            "algorithm.kl_estimator",
            self.kl_estimator,
            "k2 or k3 where algorithm.kl_placement='loss' (the gradient of k1 is zero on average),"
            " or set algorithm.kl_placement=reward",
        )
        require(0 < self.clip_low <= 1, "algorithm.clip_low", self.clip_low, "in (0, 1]")
        require(self.clip_high > 0, "algorithm.clip_high", self.clip_high, "> 0")
        require(
            self.dual_clip == 0 or self.dual_clip > 1,
            "algorithm.dual_clip",
            self.dual_clip,
            "0 (off) or > 1",
        )
        require(
            self.dual_clip == 0 or self.loss not in ("gspo", "cispo"),
            "algorithm.dual_clip",
            self.dual_clip,
            f"0 where algorithm.loss={self.loss!r}",
        )
        require(
            self.loss != "gspo" or self.aggregation == "sequence_mean",
            "algorithm.aggregation",
            self.aggregation,
            "sequence_mean where algorithm.loss='gspo' (its ratio is that of a whole response)",
        )
        require(
            self.tis_cap == 0 or self.tis_cap >= 1,
            "algorithm.tis_cap",
            self.tis_cap,
            "0 (off) or >= 1",
        )
        require(
            self.max_logprob_diff is None or self.max_logprob_diff > 0,
            "algorithm.max_logprob_diff",
            self.max_logprob_diff,
            "> 0 (null: by dtype)",
        )
        require(self.kl_coef >= 0, "algorithm.kl_coef", self.kl_coef, ">= 0")
        for name in ("num_minibatches", "num_epochs"):
            require(getattr(self, name) >= 1, f"algorithm.{name}", getattr(self, name), ">= 1")

    @property
    def has_logprob_pass(self) -> bool:
        """Return whether log-probs are computed in a separate pass before the update.

        If a batch gets only one update, the update's own forward pass computes the same numbers. Only a KL penalty in the
        reward needs them earlier.
        """
        num_updates = self.num_epochs * self.num_minibatches
        has_kl_reward = self.kl_coef > 0 and self.kl_placement == "reward"
        return self.recompute_log_probs == "always" or num_updates > 1 or has_kl_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """Adam with decoupled weight decay, and its learning-rate schedule (in optimizer steps)."""

    lr: float = 1e-6
    min_lr: float = 0.0  # at the end of a decay
    warmup_steps: int = 0
    decay: str = "constant"  # constant | linear | cosine
    decay_steps: int = 0  # required unless decay is constant
    weight_decay: float = 0.01  # not on norms and biases
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0  # of the global gradient norm; 0: off

    def __post_init__(self) -> None:
        require(self.lr > 0, "optimizer.lr", self.lr, "> 0")
        require(
            0 <= self.min_lr <= self.lr, "optimizer.min_lr", self.min_lr, f"in [0, lr={self.lr}]"
        )
        one_of("optimizer.decay", self.decay, ("constant", "linear", "cosine"))
        require(
            self.decay == "constant" or self.decay_steps > self.warmup_steps,
            "optimizer.decay_steps",
            self.decay_steps,
            f"> warmup_steps={self.warmup_steps} where decay={self.decay!r}",
        )
        for name in ("warmup_steps", "weight_decay", "clip_grad"):
            require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), ">= 0")
        for name in ("beta1", "beta2"):
            require(
                0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "in [0, 1)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class McoreSection:
    """Megatron-core. `transformer` is passed unchanged to its TransformerConfig, after ours; only some fields are allowed."""

    micro_batch_tokens: int = 8192  # at most, in one pack; a longer sequence gets its own
    recompute: str = "none"  # activation recompute: none | selective | full
    use_distributed_optimizer: bool = True  # optimizer state sharded over data-parallel ranks
    transformer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            self.micro_batch_tokens >= 1,
            "mcore.micro_batch_tokens",
            self.micro_batch_tokens,
            ">= 1",
        )
        one_of("mcore.recompute", self.recompute, ("none", "selective", "full"))
        check_transformer_fields(self.transformer)
