"""Sends many requests to SGLang at once and aborts them together. Called by the engine's `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tlt_megatron.engines.base import GenerationStopped

T = TypeVar("T")
_POLL_S = 0.2


async def answer_all(
    requests: Sequence[Callable[[], Awaitable[T]]],
    should_stop: Callable[[], bool] | None,
    *,
    abort_all: Callable[[], Awaitable[None]],
) -> list[T]:
    """Return the answers in the order of the requests.

    GenerationStopped if `should_stop` returns True. The first error of a request is raised. In both cases all requests are
    aborted and have ended in SGLang before this raises, so that the engine can be used afterwards.
    """
    tasks = [asyncio.ensure_future(request()) for request in requests]
    try:
        while not all(task.done() for task in tasks):
            _raise_first_error(tasks)
            if should_stop is not None and should_stop():
                raise GenerationStopped(
                    f"should_stop: {sum(not task.done() for task in tasks)} of {len(tasks)} responses were given up"
                )
            await asyncio.wait(tasks, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks]
    except asyncio.CancelledError:  # the engine is lost and cannot answer
        for task in tasks:
            task.cancel()
        raise
    except Exception:
        await _abort(tasks, abort_all)
        raise


def _raise_first_error(tasks: Sequence[asyncio.Task[T]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def _abort(
    tasks: Sequence[asyncio.Task[T]], abort_all: Callable[[], Awaitable[None]]
) -> None:
    """Abort until all requests have ended. One abort is not enough: a request may reach the scheduler after it. Errors of
    aborted requests are expected and ignored."""
    while not all(task.done() for task in tasks):
        await abort_all()
        await asyncio.wait(tasks, timeout=_POLL_S)
    await asyncio.gather(*tasks, return_exceptions=True)
