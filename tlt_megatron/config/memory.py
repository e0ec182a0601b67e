"""What a run will take of a rank's memory, from sizes alone: printed before launch, and refused where it cannot fit.

Called by the launcher. What to know: rollouts and updates take turns, so the peak is the larger of two phases; policy,
gradients and optimizer state stay through both, an engine's weights and key-values are given back for the update. Numbers
are estimates on the low side: no fragmentation, no communication buffers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tlt_megatron.config.schema import RunConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
_GRAD_BYTES = 4  # Megatron sums gradients in float32
# Adam: two moments, and a float32 copy of what is not float32 itself.
_OPTIMIZER_BYTES = {"float32": 8, "bfloat16": 12}
# Bytes of activations per token, hidden unit and layer in 16 bits without attention matrices: Korthikanti et al. 2022,
# "Reducing Activation Recomputation in Large Transformer Models", equation 2: 10 outside of what tensor parallelism cuts.
_ACTIVATION_BYTES, _UNCUT_BYTES = 34, 10
_CUDA_CONTEXT_BYTES = 1 << 30  # libraries, communicators and one set of graphs
_GRAPHS_BYTES = 512 << 20  # of every further strategy that is kept captured
_NUM_AUX_LAYERS = 3  # of an EAGLE-3 drafter, and the final states beside them
_TAP_ITEM_BYTES = 4  # float32, whatever the policy computes in
_USABLE_SHARE = 0.95  # of what is free
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Numbers of parameters, from config.json."""

    hidden: int
    vocab: int
    layers: int
    layer: int  # of one decoder layer
    kv: int  # of the keys and values of one position in one layer
    is_tied: bool

    @staticmethod
    def read(model_path: str) -> ModelSizes:
        """The sizes of the model in a folder, with the defaults that transformers gives the supported families."""
        text = (Path(model_path) / "config.json").read_text(encoding="utf-8")
        hf = json.loads(text)
        hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
        head_dim = hf.get("head_dim") or hidden // heads
        kv_heads = hf.get("num_key_value_heads") or heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        return ModelSizes(
            hidden=hidden,
            vocab=hf["vocab_size"],
            layers=hf["num_hidden_layers"],
            layer=attention + 3 * hidden * hf["intermediate_size"] + 2 * hidden,
            kv=2 * kv_heads * head_dim,
            is_tied=bool(hf.get("tie_word_embeddings", False)),
        )

    @property
    def embedding(self) -> int:
        """Embedding alone."""
        return self.vocab * self.hidden

    @property
    def total(self) -> int:
        """All parameters."""
        return self.layers * self.layer + self.embedding * (1 if self.is_tied else 2) + self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank, the fullest one."""

    policy: int  # training weights, and those of a reference policy
    gradients: int
    optimizer: int
    activations: int  # of one micro-batch, logits included
    rollout_weights: int
    kv: int
    drafter: int  # weights, key-values and, with spot training, its optimizer
    graphs: int  # and what CUDA itself takes
    tap: int  # states for the drafter, kept through the whole update where that is the first pass

    @property
    def rollout_phase(self) -> int:
        """While responses are generated."""
        return self._resident + self.rollout_weights + self.kv

    @property
    def update_phase(self) -> int:
        """While the policy is trained."""
        return self._resident + self.activations + self.tap

    @property
    def peak(self) -> int:
        """The larger of the two."""
        return max(self.rollout_phase, self.update_phase)

    @property
    def _resident(self) -> int:
        return self.policy + self.gradients + self.optimizer + self.drafter + self.graphs

    def describe(self) -> str:
        """One line."""
        parts = [
            "policy",
            "gradients",
            "optimizer",
            "drafter",
            "graphs",
            "rollout_weights",
            "kv",
            "activations",
            "tap",
        ]
        listed = ", ".join(f"{name} {getattr(self, name) / _MIB:,.0f}" for name in parts)
        return (
            f"memory of a rank in MiB (estimate): {listed}; rollouts {self.rollout_phase / _MIB:,.0f},"
            f" update {self.update_phase / _MIB:,.0f}"
        )


def estimate_memory(config: RunConfig, world_size: int, *, is_cuda: bool) -> MemoryEstimate:
    """Of the fullest rank. The model's config.json is read, nothing else."""
    sizes = ModelSizes.read(config.model.path)
    tp, pp = config.parallel.tensor, config.parallel.pipeline
    ends = 1 if sizes.is_tied or pp > 1 else 2  # embedding and head on one rank
    own = (sizes.layers // pp * sizes.layer + ends * sizes.embedding) // tp
    item = _ITEM_BYTES[config.model.dtype]
    num_shards = world_size // (tp * pp) if config.mcore.use_distributed_optimizer else 1
    rollout_item = _ITEM_BYTES[config.rollout.dtype]
    ranks = config.ranks_per_engine
    kv_tokens = config.rollout.kv_cache_tokens or config.rollout.max_batch_size * (
        config.data.max_prompt_tokens + config.rollout.max_new_tokens
    )
    return MemoryEstimate(
        policy=own * item * (2 if config.algorithm.kl_coef > 0 else 1),
        gradients=own * _GRAD_BYTES,
        optimizer=own * _OPTIMIZER_BYTES[config.model.dtype] // num_shards,
        activations=_activations(config, sizes),
        rollout_weights=sizes.total * rollout_item // ranks,
        kv=kv_tokens * sizes.kv * sizes.layers * rollout_item // ranks,
        drafter=_drafter(config, sizes, kv_tokens),
        graphs=_graphs(config) if is_cuda else 0,
        tap=_tap(config, sizes, world_size),
    )


def _activations(config: RunConfig, sizes: ModelSizes) -> int:
    tp, pp = config.parallel.tensor, config.parallel.pipeline
    wide = _ITEM_BYTES[config.model.dtype] / 2
    uncut = _UNCUT_BYTES / (tp if config.parallel.sequence else 1)
    per_layer = uncut + (_ACTIVATION_BYTES - _UNCUT_BYTES) / tp
    if config.mcore.recompute == "full":
        per_layer = 2 / (tp if config.parallel.sequence else 1)
    tokens = config.mcore.micro_batch_tokens
    # The first stage holds as many micro-batches as there are stages.
    kept = sizes.layers // pp * pp * tokens * sizes.hidden * per_layer * wide
    logits = 2 * 4 * tokens * sizes.vocab / tp  # and their gradient
    return int(kept + logits)


def _drafter(config: RunConfig, sizes: ModelSizes, kv_tokens: int) -> int:
    if not (config.speculation.enabled and config.speculation.is_learned):
        return 0
    ranks = config.ranks_per_engine
    item = _ITEM_BYTES[config.rollout.dtype]
    own = sizes.layer + 3 * sizes.hidden**2  # the layer, and the fusion in front of it
    held = (own + kv_tokens * sizes.kv) * item // ranks
    if config.spot.enabled:
        held += own * 4 * 4  # weights, gradients, two moments in float32
        held += 2 * sizes.embedding * item  # borrowed copies where the engine is another process
    return held


def _tap(config: RunConfig, sizes: ModelSizes, world_size: int) -> int:
    """Where log-probs are computed first, the states are taken there, and no activations lie beside them."""
    trains = config.spot.enabled and config.speculation.enabled and config.speculation.is_learned
    if not trains or config.algorithm.has_logprob_pass:
        return 0
    num_states = 1 + (_NUM_AUX_LAYERS if config.drafter.algorithm == "eagle3" else 0)
    # A data-parallel rank's answers are dealt out over its tensor-parallel ranks.
    sequences = config.rollout.num_prompts * config.rollout.num_samples
    ranks = world_size // config.parallel.pipeline
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = -(-sequences // ranks) * longest
    return min(config.spot.data_bytes, tokens * num_states * sizes.hidden * _TAP_ITEM_BYTES)


def _graphs(config: RunConfig) -> int:
    num_strategies = len(config.speculation.strategies) if config.speculation.enabled else 0
    return _CUDA_CONTEXT_BYTES + num_strategies * _GRAPHS_BYTES


def check_memory(estimate: MemoryEstimate, config: RunConfig, free_bytes: int) -> None:
    """ValueError if a phase cannot fit into what a rank has free, with what would help."""
    usable = int(free_bytes * _USABLE_SHARE)
    if estimate.peak <= usable:
        return
    if estimate.rollout_phase > usable:
        rollout = config.rollout
        advice = (
            f"rollout.max_batch_size={rollout.max_batch_size} or set rollout.kv_cache_tokens"
            f" (now {rollout.kv_cache_tokens})"
        )
        if rollout.engine == "sglang":
            advice += ", or raise sglang.engine_args.tp_size"
    else:
        advice = "mcore.micro_batch_tokens, set mcore.recompute=full, or raise parallel.tensor or parallel.pipeline"
        if estimate.tap:
            advice = f"spot.data_bytes={config.spot.data_bytes} or {advice}"
    raise ValueError(f"{estimate.describe()}; {usable / _MIB:,.0f} usable: lower {advice}")
