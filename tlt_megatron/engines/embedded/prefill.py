"""Packed prefill passes over prompts or the saved tokens of preempted requests, and the features of responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_megatron.engines.embedded.scheduler import PrefillChunk, Request
from tlt_megatron.models.attention.paged import PrefillSegment
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.types import Rollout


def prefill(model: Transformer, cache: KvCache, chunks: Sequence[PrefillChunk]) -> tuple[int, int]:
    """Run one packed pass and keep the hidden state after the last token of each chunk.

    Return the number of new tokens and the number of recomputed tokens.
    """
    token_ids, position_ids, segments = [], [], []
    num_again = 0
    for chunk in chunks:
        state, request = chunk.state, chunk.request
        if request is None:
            tokens = torch.tensor(state.prompt.token_ids[chunk.start : chunk.end])
            first = 0
            context = cache.slots(state.pages, 0, chunk.end)
            num_again += max(min(chunk.end, state.num_ever_computed) - chunk.start, 0)
            state.num_ever_computed = max(state.num_ever_computed, chunk.end)
        else:
            assert request.saved is not None
            tokens = request.saved[0][chunk.start : chunk.end]
            first = state.num_tokens
            context = cache.sequence_slots(request.kv, first + chunk.end)
            num_again += chunk.end - chunk.start
        token_ids.append(tokens)
        position_ids.append(torch.arange(first + chunk.start, first + chunk.end))
        new = context[first + chunk.start :]
        segments.append(PrefillSegment(new_slots_C=new, context_slots_S=context))
    token_ids_P = torch.cat(token_ids).to(cache.device)
    hidden_PD, features_PF = model.forward_tapped(
        token_ids_P,
        torch.cat(position_ids).to(cache.device),
        model.arithmetic.prefill(cache, segments),
        cache.tap_layers,
    )
    slots_P = torch.cat([segment.new_slots_C for segment in segments])
    cache.keep_features(slots_P, features_PF, token_ids_P)
    num_tokens = 0
    for chunk in chunks:
        num_tokens += chunk.end - chunk.start
        last_hidden_D = hidden_PD[num_tokens - 1].clone()
        if chunk.request is not None:
            chunk.request.last_hidden_D = last_hidden_D
        else:
            chunk.state.last_hidden_D = last_hidden_D
    return num_tokens - num_again, num_again


def features_of(request: Request, rollout: Rollout, cache: KvCache) -> Tensor:
    """Return a copy of the features [prompt + response - 1, F]. The model never computes the last token."""
    num_states = len(rollout.prompt_ids) + rollout.token_ids.numel() - 1
    return cache.features_TD.index_select(0, cache.sequence_slots(request.kv, num_states))
