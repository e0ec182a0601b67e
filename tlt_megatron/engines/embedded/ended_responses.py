"""Makes the records of complete responses: tokens, the reason of the end, features and routes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_megatron.engines.embedded.decode import Ended
from tlt_megatron.engines.embedded.model_pair import Models
from tlt_megatron.engines.embedded.request import Request
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.types import FinishReason, KeptTokens, Rollout, SamplingParams


def finish_reason_of(end: Ended, params: SamplingParams) -> FinishReason:
    last = int(end.tokens.token_ids_T[-1])
    has_stopped = last in params.stop_token_ids or end.request.has_stop_string
    return FinishReason.STOP if has_stopped else FinishReason.LENGTH


def make_rollout(end: Ended, models: Models, policy_version: int) -> Rollout:
    prompt, (token_ids_T, logprobs_T, policy_logprobs_T) = end.request.state.prompt, end.tokens
    routes = None
    if models.cache.has_routes:
        routes = routes_of(end.request, models.cache, models.policy.config)
    return Rollout(
        prompt_id=prompt.prompt_id,
        draw_index=prompt.draw_index,
        sample_index=end.request.sample_index,
        prompt_ids=prompt.token_ids,
        token_ids=token_ids_T,
        logprobs=logprobs_T,
        policy_logprobs=policy_logprobs_T,
        finish_reason=finish_reason_of(end, models.params),
        versions=((policy_version, token_ids_T.numel()),),
        passes=tuple(end.request.passes),
        kept=_join_kept(end.request.kept),
        routes=routes,
    )


def _join_kept(kept: Sequence[Tensor]) -> KeptTokens | None:
    if not kept:
        return None
    counts = [ids.numel() for ids in kept]
    return KeptTokens(token_ids=torch.cat(list(kept)), counts=torch.tensor(counts).int())


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
