"""Memory that policy and critic take on a rank, computed from sizes. Called by
trainer/before/memory_ledger.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlt_megatron.config.mcore_fields import layers_of_stages
from tlt_megatron.config.schema import McoreSection, ModelSection, ParallelSection
from tlt_megatron.models.sizes import ModelSizes
from tlt_megatron.runtime.memory_claim import ALL_PHASES, STEP_PHASES, MemoryClaim, Phase

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_GRAD_BYTES = 4  # Megatron sums gradients in float32
# Adam: two moments, plus a float32 copy of the weights unless they are float32.
_MOMENTS_BYTES = 8
_OPTIMIZER_BYTES = {"float32": _MOMENTS_BYTES, "bfloat16": _MOMENTS_BYTES + 4}
# Elements that one layer saves for its backward pass, per token. On CUDA: the inputs and outputs of
# both norms, which tensor parallelism splits only along the sequence; q, k and the fused projection
# that v is a view of, the attention's output; gate, up and their product
# (tests/distributed/test_memory_claims.py). CPU kernels are not fused: counted with torch's
# saved-tensor hooks.
_FUSED_D, _FUSED_F, _FUSED_Q, _FUSED_KV = 4.0, 3.0, 3.0, 1.5
_UNFUSED_D, _UNFUSED_F, _UNFUSED_Q = 7.25, 5.0, 5.5
# Per expert of a token: its copies before and after the exchange of tokens, and its result. Counted
# for even loads of the experts, without measurement.
_ROUTED_D = 3.0
# The C heap of a CPU process keeps freed blocks that no later block fits into. As a share of the
# activations of a micro-batch: 0 (SmolLM2, few steps) to 0.6 (quickstart, 50 steps with sequences
# of other lengths).
_FREED_SHARE = 0.5
_STATE_BYTES = 12  # per parameter in a checkpoint: master weight and two moments in float32
# Host bytes per parameter of a rank's shard while it loads a checkpoint: the state, and the gate
# and up projections once more, which Megatron joins. 12 B plus 16 (a small model) to 20 of 12
# (Qwen2.5) for these.
_LOAD_BYTES = 20
# Float32 tensors in host memory while a checkpoint is written: three of a parameter that shards
# cut, two in the writer.
_JOINED, _WRITTEN = 3, 2
# Of a linear with adapters, in its backward pass: the merged weight, B A before and after it is
# joined, and the gradients of weight and B A.
_MERGED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How models are cut over ranks, and on which kind of device."""

    model: ModelSection
    parallel: ParallelSection
    mcore: McoreSection
    num_data_parallel: int
    is_cuda: bool

    @property
    def num_copies(self) -> int:
        """Return the number of ranks with the same parameters, which share the optimizer's
        state.
        """
        return self.num_data_parallel * self.parallel.context

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.model.dtype]

    def parameters(self, sizes: ModelSizes) -> int:
        """Return the number of parameters of a rank of the fullest stage."""
        return sum(self._cut_parameters(sizes))

    def trained_parameters(self, sizes: ModelSizes) -> int:
        """Return the number of these parameters that have gradients, or of the adapters."""
        return sum(self._trained(sizes))

    def optimizer_parameters(self, sizes: ModelSizes) -> int:
        """Return the number of trained parameters whose optimizer state is on one rank.

        Experts have copies on fewer ranks than the rest, and share their state with those alone.
        """
        dense, experts = self._trained(sizes)
        num_ranks = self.parallel.tensor * self.num_copies  # in a stage
        return dense // self.num_copies + experts * self.parallel.expert // num_ranks

    def _trained(self, sizes: ModelSizes) -> tuple[int, int]:
        """Return (other parameters, experts) with gradients of a rank of the fullest stage."""
        rank, targets = self.model.lora_rank, self.model.lora_targets
        if not rank:
            return self._cut_parameters(sizes)
        stages = [
            sizes.adapters(layers, targets, rank, self.parallel.tensor)
            for layers in self._stages(sizes)
        ]
        return max(((d, experts // self.parallel.expert) for d, experts in stages), key=sum)

    def _cut_parameters(self, sizes: ModelSizes) -> tuple[int, int]:
        """Return (other parameters, experts) of a rank of the fullest stage.

        The first and the last stage have a table.
        """
        stages = []
        for layers in self._stages(sizes):
            num_sparse = len(sizes.sparse_layers.intersection(layers))
            dense = (len(layers) - num_sparse) * sizes.layer + num_sparse * sizes.sparse_layer
            stages.append([dense, num_sparse * sizes.experts // self.parallel.expert])
        stages[0][0] += sizes.table * (sizes.num_tables if self.parallel.pipeline == 1 else 1)
        stages[-1][0] += sizes.table * (self.parallel.pipeline > 1)
        return max(((d // self.parallel.tensor, experts) for d, experts in stages), key=sum)

    def checkpoint_bytes(self, sizes: ModelSizes) -> tuple[int, int]:
        """Return the bytes of a model's checkpoint, and how many of them the fullest rank
        writes.
        """
        item, rank = self.item_bytes, self.model.lora_rank
        own = self.trained_parameters(sizes)
        share = own * item + self.optimizer_parameters(sizes) * _STATE_BYTES
        adapters = sizes.adapters(range(sizes.num_layers), self.model.lora_targets, rank)
        return (sum(adapters) if rank else sizes.total) * (item + _STATE_BYTES), share

    def pass_bytes(self, sizes: ModelSizes, num_tokens: int) -> tuple[int, int]:
        """Return the bytes of activations and of logits on the fullest stage.

        The first of p stages holds the activations of p micro-batches, the next those of p - 1, the
        last those of one and the logits; interleaved stages hold more (`_layers_held`). With full
        recomputation each layer keeps its input, with a selective one all but what is computed
        again. When one layer is computed again, the logits are gone, and its activations are there
        twice, once as gradients.
        """
        mlp = (_FUSED_F if self.is_cuda else _UNFUSED_F) * sizes.active_ffn
        mlp += _ROUTED_D * sizes.num_routed * sizes.hidden
        if self.is_cuda:
            rest = _FUSED_D * sizes.hidden + _FUSED_Q * sizes.query + _FUSED_KV * sizes.kv
        else:
            rest = _UNFUSED_D * sizes.hidden + _UNFUSED_Q * sizes.query
        tensor = self.parallel.tensor
        element_bytes = -(-num_tokens // self.parallel.context) * self.item_bytes
        layer = int(element_bytes * (rest + mlp) / tensor)
        if self.parallel.context > 1 and not self.is_cuda:  # keys and values of the whole sequences
            layer += num_tokens * self.item_bytes * sizes.kv // tensor
        kept, again = layer, 0
        if self.mcore.recompute == "full":
            kept, again = int(element_bytes * sizes.hidden / tensor), 2 * layer
        elif ("moe" if sizes.experts else "mlp") in self.mcore.recompute_modules:
            dropped = int(element_bytes * mlp / tensor)
            kept, again = layer - dropped, 2 * dropped
        if self.model.lora_rank:
            again += _MERGED * 2 * sizes.hidden * sizes.ffn * self.item_bytes // tensor
        logits = 2 * element_bytes * sizes.vocab // tensor
        held = self._layers_held(sizes)
        passes = [(int(n * kept) + again, 0) for n in held]
        return max((int(held[-1] * kept), logits), *passes, key=sum)

    def mask_bytes(self, sizes: ModelSizes, num_tokens: int, longest: int) -> int:
        """Return the bytes of attention's masks on the fullest stage, for sequences of at most
        `longest` tokens.

        Only a context-parallel rank on a CPU has them: its two chunks of a sequence attend to (rank
        + 1) and (2 cp - rank) of the 2 cp chunks (attention.py).
        """
        context = self.parallel.context
        if context == 1 or self.is_cuda:
            return 0
        share = (2 * context + 1) / (2 * context) ** 2
        layer = num_tokens * longest * share * self.item_bytes
        is_recomputed = (
            self.mcore.recompute == "full" or "core_attn" in self.mcore.recompute_modules
        )
        return int(layer * (1 if is_recomputed else max(self._layers_held(sizes))))

    def _layers_held(self, sizes: ModelSizes) -> list[float]:
        """Return, for each stage, the number of layers whose activations it holds. A layer counts
        once for each micro-batch between its forward and its backward pass.

        An interleaved pass runs one chunk (Megatron's get_pp_rank_microbatches).
        """
        num_stages, virtual = self.parallel.pipeline, self.parallel.virtual_pipeline
        held = []
        for stage, layers in enumerate(self._stages(sizes)):
            behind = num_stages - 1 - stage
            passes = behind + 1
            if virtual > 1:
                passes = (2 * behind + (virtual - 1) * num_stages + 1) / virtual
            held.append(len(layers) * passes)
        return held

    def _stages(self, sizes: ModelSizes) -> list[list[int]]:
        parallel = self.parallel
        return layers_of_stages(
            sizes.num_layers, parallel.pipeline, parallel.virtual_pipeline, self.mcore.transformer
        )


def reference_claims(sizes: ModelSizes, sharding: Sharding, path: str) -> list[MemoryClaim]:
    """Return the claims of a reference that is a second model: in host memory but for its passes.
    On a CPU it is in one place.
    """
    num_bytes = sharding.parameters(sizes) * sharding.item_bytes
    lower, used_in = f"reference.path={path!r}", {Phase.START, Phase.UPDATE}
    on_device = MemoryClaim("second model", num_bytes, used_in, lower=lower)
    in_host = MemoryClaim("second model, away", num_bytes, in_host=True, lower=lower)
    if sharding.is_cuda:
        return [on_device, in_host]
    return [MemoryClaim("second model", num_bytes, lower=lower)]


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

    `batch_tokens` is the most tokens that a data-parallel rank trains on in one update. `longest`
    is the length of its longest sequence in tokens.
    """
    mcore, parallel, is_cuda = sharding.mcore, sharding.parallel, sharding.is_cuda
    item, num_shares = sharding.item_bytes, sharding.num_copies
    models = [sizes] if critic is None else [sizes, critic]
    own = [sharding.parameters(model) for model in models]
    trained = [sharding.trained_parameters(model) for model in models]
    has_adapters = sharding.model.lora_rank > 0
    states = [sharding.optimizer_parameters(model) for model in models]
    # With mcore.offload_in_rollouts, the optimizer of a model is in host memory while the other
    # model updates. On a CPU it stays where it is.
    offloads, moves = mcore.offload_in_rollouts, mcore.offload_in_rollouts and is_cuda
    is_away = moves and has_adapters  # the frozen weights in rollouts
    update, learns = {Phase.UPDATE}, {Phase.START, Phase.UPDATE}
    outside = ALL_PHASES - update

    gradients = (max(trained) if offloads else sum(trained)) * _GRAD_BYTES
    state_bytes = _OPTIMIZER_BYTES[sharding.model.dtype]
    num_states = max(states) if moves else sum(states)
    optimizer = num_states * state_bytes
    # Megatron copies the parameters into its buffers before the optimizer has moments.
    copied = max(0, max(trained) * item - num_states * _MOMENTS_BYTES)
    away = states[0] * state_bytes if moves else 0
    critic_away = max(states) * state_bytes if moves and critic else 0

    micro_tokens = max(longest, min(mcore.micro_batch_tokens, batch_tokens))
    activations = max(sharding.pass_bytes(model, micro_tokens)[0] for model in models)
    logits = sharding.pass_bytes(sizes, micro_tokens)[1]
    masks = max(sharding.mask_bytes(model, micro_tokens, longest) for model in models)
    # The C heap of a CPU process keeps what an update freed; CUDA's cache is emptied before
    # rollouts.
    kept_in = update if is_cuda else STEP_PHASES
    freed = 0 if is_cuda else int(_FREED_SHARE * activations)

    largest = max(sizes.table, 2 * sizes.hidden * sizes.ffn) // parallel.tensor
    if has_adapters:
        largest = sharding.model.lora_rank * max(sizes.hidden, sizes.ffn)
    buffers = 4 * largest * (_WRITTEN + _JOINED * (num_shares > 1))
    # While the policy loads, its optimizer is not away.
    loaded = max(0, max(states) * _LOAD_BYTES - away) if resumes else 0
    num_units = 2 + (parallel.pipeline > 1)  # one is sent while another is gathered
    exported = num_units * max(sizes.layer, sizes.table) * 4

    layout = f"parallel.tensor={parallel.tensor} or parallel.pipeline={parallel.pipeline}"
    layout += f" or parallel.expert={parallel.expert}" if sizes.experts else ""
    offload = f"mcore.offload_in_rollouts={offloads}"
    micro_batch = f"mcore.micro_batch_tokens={mcore.micro_batch_tokens}"
    recompute = f"{micro_batch} or mcore.recompute={mcore.recompute!r}"
    return [
        MemoryClaim("policy", own[0] * item, learns if is_away else ALL_PHASES, lower=layout),
        MemoryClaim("adapters", trained[0] * item * has_adapters, lower="model.lora_rank"),
        MemoryClaim("critic", sum(own[1:]) * item, lower=layout),
        MemoryClaim(
            "gradients",
            gradients,
            learns if offloads else ALL_PHASES,
            lower=f"{layout} or {offload}",
        ),
        MemoryClaim("optimizer", optimizer, learns if moves else ALL_PHASES, lower=layout),
        MemoryClaim("activations", activations, kept_in, lower=recompute),
        MemoryClaim("freed blocks of the heap", freed, kept_in, lower=recompute, is_estimate=True),
        MemoryClaim("attention masks", masks, update, lower=recompute),
        MemoryClaim("logits and their gradient", logits, update, lower=micro_batch),
        MemoryClaim("copied parameters", copied, {Phase.START}, lower=layout),
        MemoryClaim("loaded checkpoint", loaded, {Phase.START}, in_host=is_cuda, lower=layout),
        MemoryClaim("exported layer", exported, {Phase.WEIGHT_SYNC}),
        MemoryClaim(
            "checkpoint buffers", buffers, {Phase.CHECKPOINT}, in_host=is_cuda, lower=layout
        ),
        MemoryClaim(
            "reference policy",
            own[0] * item * (has_reference and not has_adapters),
            in_host=is_cuda,
            lower="algorithm.kl_coef",
        ),
        MemoryClaim("policy, offloaded", own[0] * item * is_away, in_host=True, lower=offload),
        MemoryClaim("optimizer, offloaded", away, outside, in_host=True, lower=offload),
        MemoryClaim("critic's, offloaded", critic_away, in_host=True, lower=offload),
    ]
