"""Memory that policy and critic take on a rank, computed from sizes. Called by trainer/memory_ledger.py."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_megatron.config.mcore_fields import layers_of_stages
from tlt_megatron.config.schema import McoreSection, ModelSection, ParallelSection
from tlt_megatron.models.sizes import ModelSizes
from tlt_megatron.runtime.memory_claim import ALL_PHASES, MemoryClaim, Phase

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_GRAD_BYTES = 4  # Megatron sums gradients in float32
# Adam: two moments, plus a float32 copy of the weights unless they are float32.
_OPTIMIZER_BYTES = {"float32": 8, "bfloat16": 12}
# Elements that one layer saves for its backward pass, per token. On CUDA: the inputs and outputs of both norms, which tensor
# parallelism splits only along the sequence; q, k and the fused projection that v is a view of, the attention's output; gate,
# up and their product (tests/distributed/test_memory_claims.py). CPU kernels are not fused: counted with torch's saved-tensor
# hooks.
_FUSED_D, _FUSED_F, _FUSED_Q, _FUSED_KV = 4.0, 3.0, 3.0, 1.5
_UNFUSED_D, _UNFUSED_F, _UNFUSED_Q = 7.25, 5.0, 5.5
# The C heap of a CPU process keeps freed blocks that no later block fits into. As a share of the activations of a micro-batch:
# 0 (SmolLM2, few steps) to 0.6 (quickstart, 50 steps with sequences of other lengths).
_FREED_SHARE = 0.5
_STATE_BYTES = 12  # per parameter in a checkpoint: master weight and two moments in float32
# Host bytes per parameter of a rank's shard while it loads a checkpoint: the state, and the gate and up projections once more,
# which Megatron joins. 12 B plus 16 (a small model) to 20 of 12 (Qwen2.5) for these.
_LOAD_BYTES = 20
# Float32 tensors in host memory while a checkpoint is written: three of a parameter that shards cut, two in the writer.
_JOINED, _WRITTEN = 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How models are cut over ranks, and on which kind of device."""

    model: ModelSection
    parallel: ParallelSection
    mcore: McoreSection
    num_data_parallel: int
    is_cuda: bool

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.model.dtype]

    def parameters(self, sizes: ModelSizes) -> int:
        """Return those of the fullest stage. The first and the last stage have a table."""
        stages = [n * sizes.layer for n in self._stages(sizes)]
        stages[0] += sizes.table * (sizes.num_tables if self.parallel.pipeline == 1 else 1)
        stages[-1] += sizes.table * (self.parallel.pipeline > 1)
        return max(stages) // self.parallel.tensor

    def checkpoint_bytes(self, sizes: ModelSizes) -> tuple[int, int]:
        """Return the bytes of a model's checkpoint, and how many of them the fullest rank writes."""
        item, own = self.item_bytes, self.parameters(sizes)
        share = own * item + own * _STATE_BYTES // self.num_data_parallel
        return sizes.total * (item + _STATE_BYTES), share

    def pass_bytes(self, sizes: ModelSizes, num_tokens: int) -> tuple[int, int]:
        """Return the bytes of activations and of logits on the fullest stage.

        The first of p stages holds the activations of p micro-batches, the next those of p - 1, the last those of one and the
        logits. With full recomputation each layer keeps its input. When one layer is computed again, the logits are gone, and its activations are
        there twice, once as gradients.
        """
        if self.is_cuda:
            uncut = _FUSED_D * sizes.hidden
            cut = _FUSED_F * sizes.ffn + _FUSED_Q * sizes.query + _FUSED_KV * sizes.kv
        else:
            uncut = _UNFUSED_D * sizes.hidden
            cut = _UNFUSED_F * sizes.ffn + _UNFUSED_Q * sizes.query
        tensor = self.parallel.tensor
        element_bytes = num_tokens * self.item_bytes
        layer = int(element_bytes * (uncut + cut) / tensor)
        kept, again = layer, 0
        if self.mcore.recompute == "full":
            kept, again = int(element_bytes * sizes.hidden / tensor), 2 * layer
        logits = 2 * element_bytes * sizes.vocab // tensor
        stages = self._stages(sizes)
        passes = [(n * kept * (len(stages) - i) + again, 0) for i, n in enumerate(stages)]
        return max((stages[-1] * kept, logits), *passes, key=sum)

    def _stages(self, sizes: ModelSizes) -> list[int]:
        return layers_of_stages(sizes.num_layers, self.parallel.pipeline, self.mcore.transformer)


def policy_claims(
    sizes: ModelSizes,
    critic: ModelSizes | None,
    sharding: Sharding,
    *,
    has_reference: bool,
    batch_tokens: int,
    longest: int,
    resumes: bool,
) -> list[MemoryClaim]:
    """Return the claims of the fullest rank. `resumes`: it may load a checkpoint.

    `critic` has the sizes of a critic, counted as a model whose embeddings are tied.

    `batch_tokens` is the most tokens that a data-parallel rank trains on in one update. `longest` is the length of its longest
    sequence in tokens.
    """
    mcore, parallel, is_cuda = sharding.mcore, sharding.parallel, sharding.is_cuda
    item, num_shares = sharding.item_bytes, sharding.num_data_parallel
    own = sharding.parameters(sizes)
    critic_own = 0 if critic is None else sharding.parameters(critic)
    larger = max(own, critic_own)
    # With mcore.offload_in_rollouts, each model is away in the update of the other. On a CPU its optimizer stays.
    offloads, moves = mcore.offload_in_rollouts, mcore.offload_in_rollouts and is_cuda
    update = {Phase.UPDATE}
    outside = ALL_PHASES - update

    gradients = (larger if offloads else own + critic_own) * _GRAD_BYTES
    state_bytes = _OPTIMIZER_BYTES[sharding.model.dtype]
    optimizer = (larger if moves else own + critic_own) * state_bytes // num_shares
    away = own * state_bytes // num_shares if moves else 0
    critic_away = larger * state_bytes // num_shares if moves and critic else 0

    micro_tokens = max(longest, min(mcore.micro_batch_tokens, batch_tokens))
    activations, logits = sharding.pass_bytes(sizes, micro_tokens)
    if critic is not None:
        activations = max(activations, sharding.pass_bytes(critic, micro_tokens)[0])
    # The C heap of a CPU process keeps what an update freed; CUDA's cache is emptied before rollouts.
    kept_in = update if is_cuda else ALL_PHASES
    freed = 0 if is_cuda else int(_FREED_SHARE * activations)

    largest = max(sizes.table, 2 * sizes.hidden * sizes.ffn) // parallel.tensor
    buffers = 4 * largest * (_WRITTEN + _JOINED * (num_shares > 1))
    if resumes:  # a load comes before anything is away
        buffers = max(buffers, larger * _LOAD_BYTES // num_shares - away)
    exported = 2 * max(sizes.layer, sizes.table) * 4

    layout = f"parallel.tensor={parallel.tensor} or parallel.pipeline={parallel.pipeline}"
    offload = f"mcore.offload_in_rollouts={offloads}"
    micro_batch = f"mcore.micro_batch_tokens={mcore.micro_batch_tokens}"
    recompute = f"{micro_batch} or mcore.recompute={mcore.recompute!r}"
    return [
        MemoryClaim("policy", own * item, lower=layout),
        MemoryClaim("critic", critic_own * item, lower=layout),
        MemoryClaim(
            "gradients",
            gradients,
            update if offloads else ALL_PHASES,
            lower=f"{layout} or {offload}",
        ),
        MemoryClaim("optimizer", optimizer, update if moves else ALL_PHASES, lower=layout),
        MemoryClaim("activations", activations, kept_in, lower=recompute),
        MemoryClaim("freed blocks of the heap", freed, kept_in, lower=recompute, is_estimate=True),
        MemoryClaim("logits and their gradient", logits, update, lower=micro_batch),
        MemoryClaim("exported layer", exported, {Phase.WEIGHT_SYNC}),
        MemoryClaim(
            "checkpoint buffers", buffers, {Phase.CHECKPOINT}, in_host=is_cuda, lower=layout
        ),
        MemoryClaim(
            "reference policy",
            own * item * has_reference,
            in_host=is_cuda,
            lower="algorithm.kl_coef",
        ),
        MemoryClaim("optimizer outside of updates", away, outside, in_host=True, lower=offload),
        MemoryClaim("critic's, outside of updates", critic_away, in_host=True, lower=offload),
    ]
