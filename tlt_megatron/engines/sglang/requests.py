"""Many requests to SGLang at once, and how they are given up together. Called by the engine's `generate`."""

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
    """The answers in the order of the requests.

    GenerationStopped once `should_stop` says so. The first error of a request is raised. In both cases all requests are
    aborted and have ended in SGLang before this returns, so that the engine can be used afterwards.
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
    except asyncio.CancelledError:  # the engine is lost: nobody would answer
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
    """Repeated, as a request may be on its way to the scheduler when it drops all that it knows. What the aborted requests
    answer is an error of each, which is the point of it."""
    while not all(task.done() for task in tasks):
        await abort_all()
        await asyncio.wait(tasks, timeout=_POLL_S)
    await asyncio.gather(*tasks, return_exceptions=True)
