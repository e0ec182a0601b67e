"""Answers requests of many clients in one running batch, for `tlt serve` and `Engine`.

`EmbeddedEngine.serve` calls `serve_clients`. Requests join between two passes and each samples with
its own settings. A request that nobody needs any longer leaves within one pass. Nothing of a
response stays after its end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from tlt_megatron.engines.embedded.decode import Ended
from tlt_megatron.engines.embedded.ended_responses import finish_reason_of
from tlt_megatron.engines.embedded.generation import Generation
from tlt_megatron.engines.embedded.request import DrawnTokens, ResponseKey, make_requests
from tlt_megatron.engines.embedded.scheduler import Scheduler
from tlt_megatron.types import FinishReason, Prompt, SamplingParams


class NewRequests(NamedTuple):
    """What clients want since the last pass."""

    prompts: Sequence[tuple[Prompt, SamplingParams]]  # no two open ones have the same prompt_id
    stopped: Collection[ResponseKey] = ()  # responses that nobody needs any longer


class Clients(Protocol):
    """Who asks and is answered, in the thread of `EmbeddedEngine.serve`."""

    def take(self, *, is_idle: bool) -> NewRequests | None:
        """Return what has come since the last call, made before every pass. After None, `serve`
        touches nothing any more.

        `is_idle`: no response is open.
        """
        ...

    def receive(self, key: ResponseKey, tokens: DrawnTokens, accept_lengths: Sequence[int]) -> None:
        """Take the next tokens of a response, the stop token included. `accept_lengths` are those
        of all its passes so far.
        """

    def finish(self, key: ResponseKey, reason: FinishReason) -> None:
        """Note that a response has all its tokens. It is not called for a stopped one."""


def serve_clients(
    run: Generation, scheduler: Scheduler, clients: Clients, params: SamplingParams
) -> None:
    """Run passes until `clients.take` returns None. `params` hold the stop tokens of all."""
    num_requests = 0
    ended: list[Ended] = []
    while (new := clients.take(is_idle=run.is_done)) is not None:
        for prompt, own in new.prompts:
            requests = make_requests([prompt], own, first_order=num_requests)
            num_requests += len(requests)
            scheduler.add(requests)
        stopped = frozenset(new.stopped)
        scheduler.drop_waiting(stopped)
        has_ended = {end.request for end in ended}
        gone = [r for r in scheduler.running if r.key in stopped and r not in has_ended]
        run.advance(ended, gone)
        run.passes.clear()
        ended = [] if run.is_done else run.sample()
        for request, tokens in run.take_news():
            clients.receive(request.key, tokens, [count for _, count in request.passes])
        for end in ended:
            clients.finish(end.request.key, finish_reason_of(end, params))
