"""An episode of verifiers as a conversation: each request of its client is one turn of the policy.

`verifiers_environment.py` takes the requests, in the form of vLLM's `/inference/v1/generate`. The
prompt of one must extend the tokens so far, and its tail is the answer to the last turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from tlt_megatron.rewards.environment import Step, Turn
from tlt_megatron.types import Message

_WITHOUT_EFFECT = ("skip_special_tokens", "routed_experts_prompt_start")  # on the tokens
_OTHER = "a second agent or a second attempt asks the policy: only one can be trained"
_LIMIT = "max_turns"  # verifiers' name for a limit that ends an episode

Response = tuple[int, dict[str, object]]  # HTTP status and JSON


class Episode:
    """One episode. `policy` is the one of `Environment.start`."""

    def __init__(self, policy: Mapping[str, Any]) -> None:
        self.traces: dict[str, Any] = {}  # of the agents, by the id in their requests
        self._policy = policy
        self._agent = ""  # the id of the trace that the policy plays
        self._token_ids: list[int] = []  # so far
        self._is_over = False  # no turn follows
        self._prompt: Step | None = None  # that no one has taken yet
        self._turn: asyncio.Future[Turn | None] | None = None  # the client waits for it
        self._refusal = ""
        self._news = asyncio.Event()
        self._run: asyncio.Task[Any]

    def begin(self, run: Coroutine[Any, Any, Any], on_end: Callable[[], Any]) -> None:
        """Run verifiers' coroutine of the episode."""
        self._run = asyncio.create_task(run)
        self._run.add_done_callback(lambda _: on_end())

    async def serve(self, request: Mapping[str, Any], agent: str) -> Response:
        """Return the response to a request, when the policy has written the turn."""
        is_other = self._agent not in ("", agent)
        if self._is_over and not is_other:
            return self._stop(agent)
        if why := _OTHER if is_other else self._problem(request):
            self._refusal = self._refusal or f"verifiers: {why}"
            self._news.set()
            return _error(why)
        token_ids, num_known = request["token_ids"], len(self._token_ids)
        messages = [_as_message(each) for each in self.traces[agent].pending] if num_known else []
        self._prompt = Step(messages, token_ids=token_ids[num_known:])
        self._agent, self._token_ids = agent, token_ids
        self._turn = asyncio.get_running_loop().create_future()
        self._news.set()
        turn = await self._turn
        return self._stop(agent) if turn is None else (200, self._response(turn))

    async def next_prompt(self, turn: Turn | None = None) -> Step:
        """Give the client the turn that it waits for. Return the tokens that follow, or the end.

        ValueError for a request that cannot be served, and for an episode that failed.
        """
        if turn is not None:
            self._is_over = turn.is_last
            self._token_ids = [*self._token_ids, *turn.token_ids]
            self._give(turn)
        if self._is_over:
            return Step(is_done=True)
        news = asyncio.create_task(self._news.wait())
        await asyncio.wait([self._run, news], return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        self._news.clear()
        prompt, self._prompt = self._prompt, None
        if prompt is None or self._refusal:
            await self.end()
            return Step(is_done=True)
        return prompt

    async def end(self) -> dict[str, float]:
        """End the episode, if it has not ended. Return its rewards and metrics. ValueError as in
        `next_prompt`.
        """
        self._is_over = True
        if not self._refusal:
            self._give(None)
            await asyncio.wait([self._run])
        if self._refusal:
            raise ValueError(self._refusal)
        episode = self._run.result()
        failed = [*episode.errors, *(each for t in episode.traces if not t.ok for each in t.errors)]
        if failed or not self._agent:
            why = f"{failed[0].type}: {failed[0].message}" if failed else "it asks for no turn"
            raise ValueError(f"verifiers: the episode failed: {why}")
        trace = self.traces[self._agent]
        rewards = {name: each.score for name, each in trace.rewards.items() if each is not None}
        return {**trace.metrics, **rewards, "score": trace.reward}

    def cancel(self) -> None:
        """End the episode at once."""
        self._run.cancel()
        if self._turn is not None:
            self._turn.cancel()

    def _give(self, turn: Turn | None) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(turn)

    def _stop(self, agent: str) -> Response:
        """End the episode as one of verifiers' own limits does, so that it is scored."""
        self.traces[agent].stop(_LIMIT)
        return _error("a limit of the run has ended the conversation")

    def _response(self, turn: Turn) -> dict[str, object]:
        is_cut = turn.is_last and turn.token_ids[-1] not in self._policy["stop_token_ids"]
        pairs = zip(turn.token_ids, turn.logprobs, strict=True)
        tokens = [{"token": f"token_id:{each}", "logprob": logprob} for each, logprob in pairs]
        choice = {
            "index": 0,
            "token_ids": turn.token_ids,
            "logprobs": {"content": tokens},
            "finish_reason": "length" if is_cut else "stop",
        }
        return {"request_id": self._agent, "choices": [choice]}

    def _problem(self, request: Mapping[str, Any]) -> str:
        """Return why this is no request for the next turn; "" if it is one."""
        so_far, prompt = self._token_ids, request["token_ids"]
        if self._turn is not None and not self._turn.done():
            return "a second sample is asked for while the policy writes a turn"
        if prompt[: len(so_far)] != so_far:
            pairs = enumerate(zip(prompt, so_far, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), len(prompt))
            return (
                f"the prompt of {len(prompt)} tokens does not extend the {len(so_far)} tokens so far, from token {first} on:"
                " its messages were changed, or the renderer writes the turns before in another way"
            )
        if further := set(request) - {"model", "token_ids", "sampling_params"}:
            return f"{min(further)}: the engine takes tokens alone"
        params = request["sampling_params"]
        return next(filter(None, (self._differs(*item) for item in params.items())), "")

    def _differs(self, name: str, value: Any) -> str:
        """Return how a sampling setting differs from the run's; "" if it does not."""
        known = {**self._policy, "logprobs": 1, "n": 1}
        if name in _WITHOUT_EFFECT:
            return ""
        if name == "stop_token_ids":
            stops = known[name]
            is_same, stops_text = set(value) <= set(stops), f"the run's turns end with {stops}"
            return "" if is_same else f"{name}={value}: {stops_text}"
        if name == "max_tokens":
            limit = known["max_new_tokens"]
            return "" if value >= limit else f"{name}={value}: rollout.max_new_tokens={limit} holds"
        if name not in ("temperature", "top_p", "top_k", "logprobs", "n"):
            return f"{name}={value!r}: the engine has no such setting of a turn"
        return "" if value == known[name] else f"{name}={value}: turns have {name}={known[name]}"


def _as_message(message: Any) -> Message:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(getattr(part, "text", "") for part in content or ())
    return {"role": message.role, "content": content}


def _error(why: str) -> Response:
    return 400, {"error": {"message": why, "type": "invalid_request_error"}}
