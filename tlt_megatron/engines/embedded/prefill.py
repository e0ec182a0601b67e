"""Packed prefill passes over prompts or the saved tokens of preempted requests, and what they keep
of responses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_megatron.engines.embedded.request import PrefillChunk, PromptState, Request
from tlt_megatron.models.attention.paged import PrefillSegment
from tlt_megatron.models.config import ModelConfig
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


def features_of(request: Request, cache: KvCache) -> Tensor:
    """Return a copy of the features of a complete response, [prompt + response - 1, F]. The model
    never computes the last token.
    """
    slots_S = cache.sequence_slots(request.kv, request.position)
    return cache.features_TD.index_select(0, slots_S)


def routes_of(request: Request, cache: KvCache, config: ModelConfig) -> Tensor:
    """Return a copy of the experts of each token but the last, [prompt + response - 1, L, K]
    int16.
    """
    assert config.experts is not None
    slots_S = cache.sequence_slots(request.kv, request.position)
    routes_SR = cache.routes_TR.index_select(0, slots_S)
    return routes_SR.view(len(routes_SR), -1, config.experts.num_per_token)
