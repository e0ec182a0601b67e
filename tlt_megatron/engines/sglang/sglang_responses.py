"""Waits for many responses of SGLang at once, and turns each into a checked `Rollout`.

SGLang returns token ids and log-probabilities in separate lists. They are compared entry by entry,
because a log-probability of another token would silently corrupt training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.engines.sglang.answers import VERIFY_PASSES
from tlt_megatron.types import FinishReason, KeptTokens, Prompt, Rollout, SamplingParams

T = TypeVar("T")
_POLL_S = 0.2
_OPEN_POLL_S = 0.02  # while more requests may come


async def answer_all(
    requests: Sequence[Callable[[], Awaitable[T]]],
    should_stop: Callable[[], bool] | None,
    *,
    abort_all: Callable[[], Awaitable[None]],
    more_requests: Callable[[], Sequence[Callable[[], Awaitable[T]]] | None] = lambda: None,
) -> list[T]:
    """Return the answers in the order of the requests.

    `more_requests` returns further ones, or None when there will be no more.
    GenerationStopped if `should_stop` returns True; the first error of a request is raised. In both
    cases all requests are aborted and have ended in SGLang before, so the engine can be used again.
    """
    tasks = [asyncio.ensure_future(request()) for request in requests]
    pending = set(tasks)
    is_open = True
    try:
        while pending or is_open:
            if should_stop is not None and should_stop():
                raise GenerationStopped(
                    f"should_stop: {len(pending)} of {len(tasks)} responses were given up"
                )
            if is_open:
                more = more_requests()
                is_open = more is not None
                new = [asyncio.ensure_future(request()) for request in more or ()]
                tasks += new
                pending.update(new)
            if not pending:
                await asyncio.sleep(_OPEN_POLL_S)
                continue
            done, pending = await asyncio.wait(
                pending,
                timeout=_OPEN_POLL_S if is_open else _POLL_S,
                return_when=asyncio.FIRST_EXCEPTION,
            )
            for task in done:
                task.result()
        return [task.result() for task in tasks]
    except asyncio.CancelledError:  # the engine is lost and cannot answer
        for task in tasks:
            task.cancel()
        raise
    except Exception:
        # One abort is not enough: a request may reach the scheduler after it.
        while not all(task.done() for task in tasks):
            await abort_all()
            await asyncio.wait(tasks, timeout=_POLL_S)
        await asyncio.gather(*tasks, return_exceptions=True)  # errors of aborted requests
        raise


def make_rollout(
    prompt: Prompt,
    sample_index: int,
    params: SamplingParams,
    policy_version: int,
    output: Mapping[str, Any],
) -> Rollout:
    """Return the rollout of one answer. RuntimeError if it was aborted, ended unexpectedly, has
    another weight version, or its log-probabilities do not match its tokens."""
    request = f"response {sample_index} to prompt {prompt.prompt_id!r}"
    meta, token_ids = output["meta_info"], list(output["output_ids"])
    if meta["weight_version"] != str(policy_version):
        raise RuntimeError(
            f"sglang: {request} has weights of version {meta['weight_version']}: must be {policy_version}"
        )
    reason = meta["finish_reason"]["type"]
    has_stopped = bool(token_ids) and token_ids[-1] in params.stop_token_ids
    if reason not in ("stop", "length") or (reason == "stop" and not has_stopped):
        raise RuntimeError(
            f"sglang: {request} ended after {len(token_ids)} tokens with {meta['finish_reason']}: expected one of"
            f" stop_token_ids={params.stop_token_ids} or max_new_tokens={prompt.limit(params)}"
        )
    logprobs = _checked_logprobs(meta["output_token_logprobs"], token_ids, request)
    policy_logprobs, kept = logprobs, None
    if meta.get("output_top_logprobs"):  # see `sglang_noise._as_top`
        chosen = [top[0] for top in meta["output_top_logprobs"]]
        policy_logprobs = _checked_logprobs(chosen, token_ids, request)
        kept = _kept_tokens([top[1:] for top in meta["output_top_logprobs"]], params)
    if params.temperature == 0.0:
        logprobs = torch.zeros_like(logprobs)
    # the last passes may commit tokens after the end of the response
    passes = [each for each in meta.get(VERIFY_PASSES, ()) if each[0] < len(token_ids)]
    return Rollout(
        prompt_id=prompt.prompt_id,
        draw_index=prompt.draw_index,
        sample_index=sample_index,
        prompt_ids=prompt.token_ids,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        logprobs=logprobs,
        policy_logprobs=policy_logprobs,
        finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        policy_version=policy_version,
        accept_lengths=tuple(min(count, len(token_ids) - start) for start, count in passes),
        verify_starts=tuple(start for start, _ in passes),
        kept=kept,
    )


def _kept_tokens(
    rows: Sequence[Sequence[Sequence[float]]], params: SamplingParams
) -> KeptTokens | None:
    """Return the ids of (log-probability, token id, text) at each position; None without a cut."""
    if not params.is_cut:
        return None
    ids = [int(entry[1]) for row in rows for entry in row]
    counts = [len(row) for row in rows]
    return KeptTokens(
        token_ids=torch.tensor(ids, dtype=torch.int32),
        counts=torch.tensor(counts, dtype=torch.int32),
    )


def _checked_logprobs(
    entries: Sequence[Sequence[float]], token_ids: Sequence[int], request: str
) -> Tensor:
    """Return [T] float32 from (log-probability, token id, text), compared with `token_ids`."""
    if len(entries) != len(token_ids):
        raise RuntimeError(
            f"sglang: {request} has {len(entries)} log-probabilities for {len(token_ids)} tokens: the numbers differ from"
            f" position {min(len(entries), len(token_ids))} on"
        )
    for position, (entry, token_id) in enumerate(zip(entries, token_ids, strict=True)):
        if entry[1] != token_id:
            raise RuntimeError(
                f"sglang: {request} has the log-probability of token {entry[1]} at position {position}: must be of token"
                f" {token_id}"
            )
    return torch.tensor([entry[0] for entry in entries], dtype=torch.float32)
