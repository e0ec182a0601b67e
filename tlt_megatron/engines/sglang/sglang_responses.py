"""Waits for many responses of SGLang at once, and turns each into a checked `Rollout`.

SGLang returns token ids and log-probabilities in separate lists. They are compared entry by entry,
because a log-probability of another token would silently corrupt training.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.engines.sglang.answers import VERIFY_PASSES
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.speculation.sampling import request_seed, seed_at_origin
from tlt_megatron.types import FinishReason, KeptTokens, Prompt, Rollout, SamplingParams

if TYPE_CHECKING:
    from sglang import Engine  # pyright: ignore[reportAttributeAccessIssue]

T = TypeVar("T")
_POLL_S = 0.02


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
    tasks: list[asyncio.Future[T]] = []
    new: Sequence[Callable[[], Awaitable[T]]] | None = requests
    try:
        while new is not None or not all(task.done() for task in tasks):
            tasks += [asyncio.ensure_future(request()) for request in new or ()]
            await asyncio.sleep(_POLL_S)
            answers = [task.result() for task in tasks if task.done()]  # raises the first error
            if should_stop is not None and should_stop():
                num_lost = len(tasks) - len(answers)
                raise GenerationStopped(
                    f"should_stop: {num_lost} of {len(tasks)} responses were given up"
                )
            new = None if new is None else more_requests()
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


async def generate_one(
    engine: Engine,
    prompt: Prompt,
    sample_index: int,
    params: SamplingParams,
    policy_version: int,
    on_finish: Callable[[Rollout], None] | None,
    routed: ModelConfig | None = None,
) -> tuple[Rollout, Mapping[str, Any]]:
    """Generate one response. Return the rollout and SGLang's `meta_info`. See `make_rollout`."""
    seed = request_seed(params.seed, prompt.draw_index, sample_index, prompt.first_position)
    output = await engine.async_generate(
        input_ids=list(prompt.token_ids),
        sampling_params={
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "max_new_tokens": prompt.limit(params),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": not params.stop_token_ids,
            "sampling_seed": seed_at_origin(seed, len(prompt.token_ids)),
        },
        return_logprob=True,
        top_logprobs_num=0 if params.is_plain else 1,
        return_routed_experts=routed is not None,
    )
    rollout = make_rollout(prompt, sample_index, params, policy_version, output, routed)
    if on_finish is not None:
        on_finish(rollout)
    return rollout, output["meta_info"]


def make_rollout(
    prompt: Prompt,
    sample_index: int,
    params: SamplingParams,
    policy_version: int,
    output: Mapping[str, Any],
    routed: ModelConfig | None = None,
) -> Rollout:
    """Return the rollout of one answer. RuntimeError if it was aborted, ended unexpectedly, has
    another weight version, or its log-probabilities do not match its tokens.

    `routed` is the mixture whose routes the rollout has."""
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
    policy_logprobs, kept = logprobs, []
    if meta.get("output_top_logprobs"):  # see `sglang_noise._write_top`
        chosen = [top[0] for top in meta["output_top_logprobs"]]
        policy_logprobs = _checked_logprobs(chosen, token_ids, request)
        kept = [top[1:] for top in meta["output_top_logprobs"]]
    if params.temperature == 0.0:
        logprobs = torch.zeros_like(logprobs)
    if (stop := prompt.stop_in(params)) is not None:  # SGLang, without a tokenizer, knows none
        count, state = stop.run(stop.start, token_ids)
        token_ids, has_stopped = token_ids[:count], has_stopped or state is None
    # the last passes may commit tokens after the end of the response
    passes = [each for each in meta.get(VERIFY_PASSES, ()) if each[0] < len(token_ids)]
    return Rollout(
        prompt_id=prompt.prompt_id,
        draw_index=prompt.draw_index,
        sample_index=sample_index,
        prompt_ids=prompt.token_ids,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        logprobs=logprobs[: len(token_ids)],
        policy_logprobs=policy_logprobs[: len(token_ids)],
        finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        versions=((policy_version, len(token_ids)),),
        passes=tuple(
            (len(prompt.token_ids) + start, min(count, len(token_ids) - start))
            for start, count in passes
        ),
        kept=_kept_tokens(kept[: len(token_ids)], params),
        routes=None
        if routed is None
        else _routes(meta["routed_experts"], routed)[: len(prompt.token_ids) + len(token_ids) - 1],
    )


def _routes(text: str, model: ModelConfig) -> Tensor:
    """Return the experts of all tokens but the last, [N, L, K] int16. SGLang gives all layers a
    place.
    """
    assert model.experts is not None
    numbers = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int32)
    whole = numbers.view(-1, model.num_layers, model.experts.num_per_token)
    return whole[:, list(model.experts.layers)].short()


def _kept_tokens(
    rows: Sequence[Sequence[Sequence[float]]], params: SamplingParams
) -> KeptTokens | None:
    """Return the ids of (log-probability, token id, text) at each position; None without a cut."""
    if not rows or not params.is_cut:
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
    ids = [entry[1] for entry in entries]
    for position, pair in enumerate(zip_longest(ids, token_ids)):
        if pair[0] != pair[1]:
            raise RuntimeError(
                f"sglang: {request} has {len(ids)} log-probabilities for {len(token_ids)} tokens: at position"
                f" {position} of token {pair[0]}, must be {pair[1]}"
            )
    return torch.tensor([entry[0] for entry in entries], dtype=torch.float32)
