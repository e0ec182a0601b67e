"""Packed prefill passes over prompts or the saved tokens of preempted requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlt_megatron.engines.embedded.request import PrefillChunk, PromptState
from tlt_megatron.models.attention.paged import PrefillSegment
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer


def prefill(model: Transformer, cache: KvCache, chunks: Sequence[PrefillChunk]) -> int:
    """Run one packed pass and keep the hidden state after the last token of each chunk.

    Return the number of tokens.
    """
    token_ids, position_ids, segments = [], [], []
    for owner, start, end in chunks:
        if isinstance(owner, PromptState):
            first, tokens = 0, torch.tensor(owner.prompt.token_ids[start:end])
            context = cache.slots(owner.pages, 0, end)
        else:
            assert owner.saved is not None
            first, tokens = owner.state.num_tokens, owner.saved.token_ids_T[start:end]
            context = cache.sequence_slots(owner.kv, first + end)
        token_ids.append(tokens)
        position_ids.append(torch.arange(first + start, first + end))
        new = context[first + start :]
        segments.append(PrefillSegment(new_slots_C=new, context_slots_S=context))
    token_ids_P = torch.cat(token_ids).to(cache.device)
    slots_P = torch.cat([segment.new_slots_C for segment in segments])
    cache.mark_written(slots_P)
    hidden_PD, features_PF = model.forward(
        token_ids_P,
        torch.cat(position_ids).to(cache.device),
        model.arithmetic.prefill(cache, segments),
        cache.tap_layers,
    )
    cache.keep_features(slots_P, features_PF, token_ids_P)
    if cache.has_routes:
        cache.routes_TR.index_copy_(0, slots_P, model.routes())
    num_tokens = 0
    for owner, start, end in chunks:
        num_tokens += end - start
        owner.last_hidden_D = hidden_PD[num_tokens - 1].clone()
    return num_tokens
