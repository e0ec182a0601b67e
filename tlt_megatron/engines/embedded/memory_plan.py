"""Computes the memory of an embedded engine from sizes, so that a plan can be printed or refused before allocation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.sizes import ModelSizes

PAGE_TOKENS = 64  # positions of one KV page


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes that an engine will allocate."""

    weight_item_bytes: int  # per weight
    weights_bytes: int
    kv_bytes: int
    kv_tokens: int  # positions that kv_bytes hold
    activations_bytes: (
        int  # estimate: the larger of a prefill pass and a decode pass with its logits
    )


def lane_tokens(section: RolloutSection, *, max_prompt_tokens: int, draft_slots: int) -> int:
    """Return the length of a lane (KV slots of one row): longest prompt + longest response + `draft_slots`, in full pages."""
    num_tokens = max_prompt_tokens + section.max_new_tokens + draft_slots
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS


def _num_pages(
    section: RolloutSection, *, max_prompt_tokens: int, draft_slots: int, has_graphs: bool
) -> int:
    if section.kv_cache_tokens:
        num_pages = section.kv_cache_tokens // PAGE_TOKENS
        if num_pages < 2:
            raise ValueError(
                f"rollout.kv_cache_tokens={section.kv_cache_tokens}: must be 0 or at least {2 * PAGE_TOKENS}"
                f" (a page of {PAGE_TOKENS} for a prompt and one for its response)"
            )
        return num_pages
    pages_each = -(-(section.max_new_tokens + draft_slots) // PAGE_TOKENS) + (draft_slots > 0)
    pages_each += section.batch_invariant  # responses start with a copy of their prompt's last page
    if has_graphs:
        lane = lane_tokens(section, max_prompt_tokens=max_prompt_tokens, draft_slots=draft_slots)
        pages_each = lane // PAGE_TOKENS
    prompt_pages = -(-max_prompt_tokens // PAGE_TOKENS)
    num_groups = -(-section.max_batch_size // section.num_samples) + 1
    return section.max_batch_size * pages_each + num_groups * prompt_pages


def plan_memory(
    model: ModelConfig,
    section: RolloutSection,
    *,
    max_prompt_tokens: int = 1024,
    draft_slots: int = 0,
    num_taps: int = 0,
    has_packed_weights: bool = False,
    has_graphs: bool = False,
    verify_rows: int = 1,
) -> MemoryPlan:
    """Return what `EmbeddedEngine` will allocate.

    A drafter needs `draft_slots` after each sequence. It adds one KV layer, and the tokens and features that it reads: the
    last hidden state and `num_taps` more.
    With `kv_cache_tokens=0` the KV holds `max_batch_size` full responses and the prompts of their groups, plus one prompt of a
    partly admitted group. Each prompt counts `max_prompt_tokens`.
    `has_packed_weights`: matrices are held twice (`Matrix`).
    `has_graphs`: graphs need a scratch page and lanes, in which each response follows its own copy of the prompt. The
    `GraphPlan` counts the memory of the graphs.
    `verify_rows`: rows per request of the widest verify pass, 1 without speculation.
    """
    has_drafter = draft_slots > 0
    item = getattr(torch, section.dtype).itemsize
    sizes = ModelSizes.of(model)
    d, f, v = sizes.hidden, sizes.ffn, sizes.vocab
    num_fused = model.num_heads + 2 * model.num_kv_heads
    weights = sizes.total
    # The engine repeats a head norm for every head.
    weights += (
        sizes.num_layers * (num_fused - model.num_kv_heads - 2) * model.head_dim * model.has_qk_norm
    )
    if has_packed_weights:
        weights += sizes.matrices * sizes.num_layers + v * d

    kv_tokens = PAGE_TOKENS * _num_pages(
        section,
        max_prompt_tokens=max_prompt_tokens,
        draft_slots=draft_slots,
        has_graphs=has_graphs,
    )
    num_kv_layers = model.num_layers + has_drafter
    num_slots = kv_tokens + has_graphs * PAGE_TOKENS
    kv = num_slots * (2 * model.num_kv_heads * model.head_dim * num_kv_layers + 1) * item
    if has_drafter:
        kv += num_slots * d * (1 + num_taps) * item + (num_slots + 1) * 8

    per_token = 4 * d + (num_fused + 2 * model.num_heads) * model.head_dim + 3 * f
    prefill = section.prefill_chunk_tokens * per_token * item
    # Logits, float32 logits and log-probs, and in float64 the noise and its sum with the logits.
    num_rows = section.max_batch_size * verify_rows
    decode = num_rows * (per_token * item + v * (item + 2 * 4 + 3 * 8))
    if section.batch_invariant and has_drafter:  # ordered keys and values of every query's path
        copied = draft_slots * 2 * PAGE_TOKENS * 2 * model.num_kv_heads * model.head_dim
        decode += section.max_batch_size * copied * item
    outputs = section.max_batch_size * section.max_new_tokens * 16
    return MemoryPlan(
        weight_item_bytes=item,
        weights_bytes=weights * item,
        kv_bytes=kv,
        kv_tokens=kv_tokens,
        activations_bytes=max(prefill, decode) + outputs,
    )
