"""Memory of drafter training on one rank, from sizes alone, for trainer/before/memory_ledger.py."""

from __future__ import annotations

from tlt_megatron.config.schema import DrafterSection, SpotSection
from tlt_megatron.drafter.drafter_loss import HEAD_CHUNK_TOKENS, make_objective
from tlt_megatron.models.sizes import ModelSizes
from tlt_megatron.runtime.memory_claim import STEP_PHASES, MemoryClaim, Phase

_TRAINED_BYTES = 20  # per parameter: weight, average, gradient and two moments in float32
_MOVED_BYTES = 16  # per parameter: a copy of weight, average and moments, for a broadcast
_NUM_AUX_LAYERS = 3  # tapped layers of an EAGLE-3 drafter; the final states come on top
_STATE_BYTES = 4  # per element of a tapped state on a CPU: float32 for any policy dtype


def drafter_parameters(sizes: ModelSizes) -> int:
    """Return the number of the drafter's parameters: one layer, and a fusion of up to 3 states."""
    return sizes.layer + 3 * sizes.hidden**2


def spot_claims(
    sizes: ModelSizes,
    *,
    drafter: DrafterSection,
    spot: SpotSection,
    item_bytes: int,
    step_tokens: int,
    taps_in_update: bool,
    has_pipeline: bool,
    is_cuda: bool,
) -> list[MemoryClaim]:
    """Return the memory claims of spot training on one rank.

    `item_bytes` is the element size of the arithmetic. `step_tokens` counts all tokens of a step on
    this rank. `taps_in_update`: the update's own forward pass collects the hidden states, so they
    coexist with its activations. On a GPU they are in host memory, unless pipeline stages exchange
    them. Data are in host memory.
    """
    own = drafter_parameters(sizes)
    num_states = 1 + (_NUM_AUX_LAYERS if drafter.algorithm == "eagle3" else 0)
    rows = drafter.batch_tokens
    # Per row and unroll step: states in and out, fused pair, q, k, v, gate, up, product.
    per_row = (8 * sizes.hidden + 2 * sizes.kv + 4 * sizes.ffn) * item_bytes
    batch = rows * per_row * make_objective(drafter).num_steps
    batch += 4 * 4 * HEAD_CHUNK_TOKENS * sizes.vocab  # both distributions and temporaries
    data = f"spot.data_bytes={spot.data_bytes}"
    buffered = step_tokens * (1 + spot.keep_steps) * num_states * sizes.hidden * item_bytes
    tapped = step_tokens * num_states * sizes.hidden * (item_bytes if is_cuda else _STATE_BYTES)
    batch_tokens = f"drafter.batch_tokens={drafter.batch_tokens}"
    tapped = min(spot.data_bytes, tapped) if taps_in_update else 0
    taps_in_host = is_cuda and not has_pipeline
    return [
        MemoryClaim("drafter in training", own * _TRAINED_BYTES, STEP_PHASES),
        MemoryClaim(
            "drafter data",
            min(spot.data_bytes, buffered),
            STEP_PHASES,
            in_host=is_cuda,
            lower=data,
        ),
        MemoryClaim("drafter batch", batch, {Phase.SPOT}, lower=batch_tokens, is_estimate=True),
        MemoryClaim("drafter on the move", own * _MOVED_BYTES, {Phase.SPOT}),
        MemoryClaim("tapped states", tapped, {Phase.UPDATE}, in_host=taps_in_host, lower=data),
    ]
