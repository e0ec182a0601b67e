"""Memory that policy and critic take on a rank, computed from sizes. Called by trainer/memory_ledger.py."""

from __future__ import annotations

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
_OFFLOADED = "mcore.offload_in_rollouts=True"  # lowers what it keeps in host memory
_STATE_BYTES = 12  # per parameter in a checkpoint: master weight and two moments in float32
# Host bytes per parameter of a rank's shard while it loads a checkpoint: the state, and the gate and up projections once more,
# which Megatron joins. 12 B plus 16 (a small model) to 20 of 12 (Qwen2.5) for these.
_LOAD_BYTES = 20
# Float32 tensors in host memory while a checkpoint is written: three of a parameter that shards cut, two in the writer.
_JOINED, _WRITTEN = 3, 2


def policy_claims(  # noqa: PLR0913
    sizes: ModelSizes,
    *,
    model: ModelSection,
    parallel: ParallelSection,
    mcore: McoreSection,
    num_data_parallel: int,
    has_reference: bool,
    batch_tokens: int,
    longest: int,
    resumes: bool,
    is_cuda: bool,
    critic: ModelSizes | None = None,
) -> list[MemoryClaim]:
    """Return the claims of the fullest rank. `resumes`: it may load a checkpoint.

    `critic` has the sizes of a critic, counted as a model whose embeddings are tied.

    `batch_tokens` is the most tokens that a data-parallel rank trains on in one update. `longest` is the length of its longest
    sequence in tokens.
    """
    own = _parameters_of_a_rank(sizes, parallel, mcore)
    item = _ITEM_BYTES[model.dtype]
    layout = f"parallel.tensor={parallel.tensor} or parallel.pipeline={parallel.pipeline}"
    micro_tokens = max(longest, min(mcore.micro_batch_tokens, batch_tokens))
    micro_batch = f"mcore.micro_batch_tokens={mcore.micro_batch_tokens}"
    activations, logits = _bytes_of_a_pass(sizes, micro_tokens, item, parallel, mcore, is_cuda)
    largest_own = own
    if critic is not None:  # it trains and is loaded when the policy is not
        passes = _bytes_of_a_pass(critic, micro_tokens, item, parallel, mcore, is_cuda)
        activations = max(activations, passes[0])
        largest_own = max(own, _parameters_of_a_rank(critic, parallel, mcore))
    # The C heap of a CPU process keeps what an update freed; CUDA's cache is emptied before rollouts.
    kept_in = frozenset({Phase.UPDATE}) if is_cuda else ALL_PHASES
    freed = 0 if is_cuda else int(_FREED_SHARE * activations)
    optimizer = own * _OPTIMIZER_BYTES[model.dtype] // num_data_parallel
    gradients_in = optimizer_in = ALL_PHASES
    away = 0  # bytes that a GPU keeps in host memory outside of updates
    if mcore.offload_in_rollouts:
        gradients_in = frozenset({Phase.UPDATE})
        optimizer_in = gradients_in if is_cuda else ALL_PHASES
        away = optimizer if is_cuda else 0
    largest = max(sizes.table, 2 * sizes.hidden * sizes.ffn) // parallel.tensor
    buffers = 4 * largest * (_WRITTEN + _JOINED * (num_data_parallel > 1))
    if resumes:  # a load comes before anything is away
        buffers = max(buffers, largest_own * _LOAD_BYTES // num_data_parallel - away)
    reference = own * item * has_reference
    exported = 2 * max(sizes.layer, sizes.table) * 4
    offload = f"{layout} or mcore.offload_in_rollouts={mcore.offload_in_rollouts}"
    recompute = f"{micro_batch} or mcore.recompute={mcore.recompute!r}"
    update, checkpoint, sync = (
        frozenset({phase}) for phase in (Phase.UPDATE, Phase.CHECKPOINT, Phase.WEIGHT_SYNC)
    )
    return [
        MemoryClaim("policy", own * item, lower=layout),
        MemoryClaim("reference policy", reference, in_host=is_cuda, lower="algorithm.kl_coef"),
        MemoryClaim("gradients", own * _GRAD_BYTES, phases=gradients_in, lower=offload),
        MemoryClaim("optimizer", optimizer, phases=optimizer_in, lower=layout),
        MemoryClaim(
            "optimizer outside of updates",
            away,
            phases=ALL_PHASES - update,
            in_host=True,
            lower=_OFFLOADED,
        ),
        MemoryClaim("activations", activations, phases=kept_in, lower=recompute),
        MemoryClaim("freed blocks of the heap", freed, phases=kept_in, lower=recompute),
        MemoryClaim("logits and their gradient", logits, phases=update, lower=micro_batch),
        MemoryClaim(
            "checkpoint buffers", buffers, phases=checkpoint, in_host=is_cuda, lower=layout
        ),
        MemoryClaim("exported layer", exported, phases=sync),
        *_critic_claims(critic, own, model, parallel, mcore, num_data_parallel, is_cuda),
    ]


def _critic_claims(
    critic: ModelSizes | None,
    policy_own: int,
    model: ModelSection,
    parallel: ParallelSection,
    mcore: McoreSection,
    num_data_parallel: int,
    is_cuda: bool,
) -> list[MemoryClaim]:
    """Return what a critic takes beside a policy that has `policy_own` parameters on the rank.

    With `mcore.offload_in_rollouts` each of them is away in the update of the other.
    """
    if critic is None:
        return []
    own = _parameters_of_a_rank(critic, parallel, mcore)
    trained, held_in, away = own, ALL_PHASES, 0
    if mcore.offload_in_rollouts:
        trained, held_in = max(0, own - policy_own), frozenset({Phase.UPDATE})
        away = max(own, policy_own) * is_cuda
    optimizer = _OPTIMIZER_BYTES[model.dtype]
    layout = f"parallel.tensor={parallel.tensor} or parallel.pipeline={parallel.pipeline}"
    offload = f"{layout} or mcore.offload_in_rollouts={mcore.offload_in_rollouts}"
    grads, states = trained * _GRAD_BYTES, trained * optimizer // num_data_parallel
    outside = away * optimizer // num_data_parallel
    return [
        MemoryClaim("critic", own * _ITEM_BYTES[model.dtype], lower=layout),
        MemoryClaim("critic's gradients", grads, phases=held_in, lower=offload),
        MemoryClaim("critic's optimizer", states, phases=held_in, lower=offload),
        MemoryClaim("critic's, outside of updates", outside, in_host=True, lower=_OFFLOADED),
    ]


def checkpoint_bytes(
    sizes: ModelSizes,
    *,
    model: ModelSection,
    parallel: ParallelSection,
    mcore: McoreSection,
    num_data_parallel: int,
) -> tuple[int, int]:
    """Return the bytes of a policy checkpoint, and how many of them the fullest rank writes."""
    item = _ITEM_BYTES[model.dtype]
    own = _parameters_of_a_rank(sizes, parallel, mcore)
    return sizes.total * (item + _STATE_BYTES), own * item + own * _STATE_BYTES // num_data_parallel


def _stages(sizes: ModelSizes, parallel: ParallelSection, mcore: McoreSection) -> list[int]:
    return layers_of_stages(sizes.num_layers, parallel.pipeline, mcore.transformer)


def _parameters_of_a_rank(sizes: ModelSizes, parallel: ParallelSection, mcore: McoreSection) -> int:
    """Return those of the fullest stage. The first and the last stage have a table."""
    stages = [n * sizes.layer for n in _stages(sizes, parallel, mcore)]
    stages[0] += sizes.table * (sizes.num_tables if parallel.pipeline == 1 else 1)
    stages[-1] += sizes.table * (parallel.pipeline > 1)
    return max(stages) // parallel.tensor


def _bytes_of_a_pass(
    sizes: ModelSizes,
    num_tokens: int,
    item: int,
    parallel: ParallelSection,
    mcore: McoreSection,
    is_cuda: bool,
) -> tuple[int, int]:
    """Return the bytes of activations and of logits on the fullest stage.

    The first of p stages holds the activations of p micro-batches, the next those of p - 1, the last those of one and the
    logits. With full recomputation each layer keeps its input. When one layer is computed again, the logits are gone, and its activations are
    there twice, once as gradients.
    """
    if is_cuda:
        uncut = _FUSED_D * sizes.hidden
        cut = _FUSED_F * sizes.ffn + _FUSED_Q * sizes.query + _FUSED_KV * sizes.kv
    else:
        uncut = _UNFUSED_D * sizes.hidden
        cut = _UNFUSED_F * sizes.ffn + _UNFUSED_Q * sizes.query
    element_bytes = num_tokens * item
    layer = int(element_bytes * (uncut + cut) / parallel.tensor)
    kept, again = layer, 0
    if mcore.recompute == "full":
        kept, again = int(element_bytes * sizes.hidden / parallel.tensor), 2 * layer
    logits = 2 * item * num_tokens * sizes.vocab // parallel.tensor
    stages = _stages(sizes, parallel, mcore)
    passes = [(n * kept * (len(stages) - i) + again, 0) for i, n in enumerate(stages)]
    return max((stages[-1] * kept, logits), *passes, key=sum)
