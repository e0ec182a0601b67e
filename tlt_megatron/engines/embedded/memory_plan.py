"""Computes the memory of an embedded engine from sizes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tlt_megatron.config.layout import PAGE_TOKENS
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import GraphPlan
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.matrix import packs
from tlt_megatron.models.sizes import ModelSizes
from tlt_megatron.runtime.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes that an engine will allocate, and the sizes that they follow from."""

    weights_bytes: int
    kv_bytes: int
    kv_tokens: int  # positions that kv_bytes hold
    # Estimate: the larger of a prefill pass and a decode pass with its logits.
    activations_bytes: int
    draft_slots: int  # KV slots after each sequence that a speculative step may write
    graphs: GraphPlan = field(compare=False)  # its memory is not in the bytes above


def draft_slots_of(strategies: Sequence[SpeculationStrategy]) -> int:
    """Return the most KV slots after a sequence that a step of these strategies may write.

    From the root on, a step writes nodes in the order of growth, then root and tree, then the
    committed tokens.
    """
    return max(
        (max(s.topk * max(s.num_steps - 1, 0), s.num_rows, s.depth + 1) + 1 for s in strategies),
        default=0,
    )


def _num_pages(
    section: RolloutSection, num_prompt: int, draft_slots: int, lane_pages: int, has_graphs: bool
) -> int:
    """Return the pages of the pool, for prompts of `num_prompt` tokens and lanes of `lane_pages`.
    ValueError if `kv_cache_tokens` is too small.
    """
    if section.kv_cache_tokens:
        num_pages = section.kv_cache_tokens // PAGE_TOKENS
        if num_pages < 2:
            raise ValueError(
                f"rollout.kv_cache_tokens={section.kv_cache_tokens}: must be 0 or at least {2 * PAGE_TOKENS}"
                f" (a page of {PAGE_TOKENS} for a prompt and one for its response)"
            )
        return num_pages
    pages_each = -(-(section.max_new_tokens + draft_slots) // PAGE_TOKENS) + (draft_slots > 0)
    prompt_pages = -(-num_prompt // PAGE_TOKENS)
    num_groups = -(-section.max_batch_size // section.num_samples) + 1
    beside = num_groups * prompt_pages
    # Later turns of a conversation and continued responses share no prompt. Theirs may be nearly as
    # long as a whole sequence.
    is_unshared = bool(section.environment or section.partial_rollout_tokens)
    if is_unshared:
        beside = max(beside, lane_pages)
    if has_graphs or is_unshared:
        pages_each = lane_pages
    return section.max_batch_size * pages_each + beside


def num_routes(model: ModelConfig, section: RolloutSection) -> int:
    """Return how many experts of a token the engine keeps, in all layers."""
    if model.experts is None or not section.routing_replay:
        return 0
    return len(model.experts.layers) * model.experts.num_per_token


def _num_weights(model: ModelConfig, *, is_packed: bool) -> int:
    """`is_packed`: matrices are held twice. The engine repeats a head norm for every head."""
    sizes = ModelSizes(model)
    num_repeated = model.num_heads + model.num_kv_heads - 2
    norms = sizes.num_layers * num_repeated * model.head_dim * model.has_qk_norm
    packed = sizes.matrices + sizes.vocab * sizes.hidden
    return sizes.total + norms + packed * is_packed


def plan_memory(
    model: ModelConfig,
    section: RolloutSection,
    strategies: Sequence[SpeculationStrategy] = (),
    *,
    device: Device,
    has_graphs: bool = False,
    max_prompt_tokens: int = 1024,
    num_taps: int = 0,
) -> MemoryPlan:
    """Return what `EmbeddedEngine` will allocate.

    With strategies that draft, each sequence has slots for drafted tokens after it. A learned
    drafter has one more KV layer, with tokens and features: the last hidden state and `num_taps`
    more. With `kv_cache_tokens=0` the KV holds `max_batch_size` full responses and the prompts of
    their groups, plus one of a partly admitted group. Where requests share no prompt, it holds a
    whole sequence for each and one more. Graphs need a scratch page and a lane for each row.
    """
    drafting = [strategy for strategy in strategies if not strategy.is_off]
    draft_slots = draft_slots_of(drafting)
    dtype: torch.dtype = getattr(torch, section.dtype)
    item = dtype.itemsize
    lane_pages = -(-(max_prompt_tokens + section.max_new_tokens + draft_slots) // PAGE_TOKENS)
    graphs = GraphPlan(
        model,
        drafting,
        max_batch_size=section.max_batch_size,
        max_length=lane_pages * PAGE_TOKENS,
        item_bytes=item,
    )
    num_pages = _num_pages(section, max_prompt_tokens, draft_slots, lane_pages, has_graphs)
    kv_tokens = PAGE_TOKENS * num_pages
    sizes = ModelSizes(model)
    d, f, v = sizes.hidden, sizes.active_ffn, sizes.vocab
    num_fused = model.num_heads + 2 * model.num_kv_heads
    num_slots = kv_tokens + has_graphs * PAGE_TOKENS
    is_learned = any(strategy.is_learned for strategy in drafting)
    num_kv_layers = model.num_layers + is_learned
    kv = num_slots * (2 * model.num_kv_heads * model.head_dim * num_kv_layers + 1) * item
    if is_learned:
        kv += num_slots * d * (1 + num_taps) * item + (num_slots + 1) * 8
    kv += num_slots * num_routes(model, section) * torch.int16.itemsize

    per_token = (
        (4 + sizes.num_routed) * d + (num_fused + 2 * model.num_heads) * model.head_dim + 3 * f
    )
    prefill = section.prefill_chunk_tokens * per_token * item
    # Logits, float32 logits and log-probs, and in float64 the noise and its sum with the logits.
    num_rows = section.max_batch_size * max((s.num_rows for s in drafting), default=1)
    decode = num_rows * (per_token * item + v * (item + 2 * 4 + 3 * 8))
    is_cpu_tree = device.torch_device.type == "cpu" and not all(s.is_chain for s in drafting)
    if section.batch_invariant or is_cpu_tree:  # tables of the slots that each query sees
        decode += num_rows * lane_pages * PAGE_TOKENS * 4 * torch.int64.itemsize
    outputs = section.max_batch_size * section.max_new_tokens * 16
    return MemoryPlan(
        weights_bytes=_num_weights(model, is_packed=packs(dtype, device.torch_device)) * item,
        kv_bytes=kv,
        kv_tokens=kv_tokens,
        activations_bytes=max(prefill, decode) + outputs,
        draft_slots=draft_slots,
        graphs=graphs,
    )
