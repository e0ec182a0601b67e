"""Requests of the client of verifiers, as turns of a conversation."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tlt_megatron.rewards.environment import Turn
from tlt_megatron.rewards.verifiers_episode import Episode

POLICY = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "max_new_tokens": 9, "stop_token_ids": [7]}
PARAMS = {"temperature": 0.5, "top_p": 1.0, "stop_token_ids": [7], "logprobs": 1, "n": 1}
PARAMS |= {"skip_special_tokens": False, "routed_experts_prompt_start": 3, "max_tokens": 9}


class Trace:
    rewards = {"is_right": SimpleNamespace(score=0.5), "not_run": None}  # noqa: RUF012
    metrics = {"num_words": 3.0, "no_number": None}  # noqa: RUF012
    reward, ok, errors = 0.25, True, ()

    def __init__(self) -> None:
        self.pending = [SimpleNamespace(role="tool", content=[SimpleNamespace(text="found")])]
        self.stopped: list[str] = []
        self.stop = self.stopped.append


def ask(prompt: list[int], **further: Any) -> dict[str, Any]:
    return {"model": "policy", "token_ids": prompt, "sampling_params": PARAMS | further}


def turn(*token_ids: int, is_last: bool = False) -> Turn:
    return Turn("", token_ids, logprobs=tuple(-i / 8 for i in token_ids), is_last=is_last)


def episode_of(harness: Callable[[Episode], Awaitable[Any]], policy: Any = POLICY) -> Episode:
    """Return an episode whose requests `harness` makes."""
    episode = Episode(policy)
    episode.traces = {"agent": Trace(), "other": Trace()}

    async def run() -> Any:
        failed = await harness(episode)
        return SimpleNamespace(errors=failed or [], traces=[*episode.traces.values()])

    episode.begin(run(), lambda: None)
    return episode


def test_each_request_is_a_turn_and_the_end_has_the_rewards() -> None:
    responses = []

    async def harness(episode: Episode) -> None:
        responses.append(await episode.serve(ask([1, 2]), "agent"))
        responses.append(await episode.serve(ask([1, 2, 5, 7, 8, 9]), "agent"))

    async def converse() -> None:
        episode = episode_of(harness)
        first = await episode.next_prompt()
        assert (list(first.token_ids or ()), first.messages) == ([1, 2], [])
        second = await episode.next_prompt(turn(5, 7))
        assert list(second.token_ids or ()) == [8, 9]
        assert second.messages == [{"role": "tool", "content": "found"}]
        assert (await episode.next_prompt(turn(3))).is_done
        numbers = {"num_words": 3.0, "no_number": None, "is_right": 0.5, "score": 0.25}
        assert await episode.end() == numbers

    asyncio.run(converse())
    [(status, response), (_, last)] = responses
    [choice] = response["choices"]
    assert (status, choice["token_ids"], choice["finish_reason"]) == (200, (5, 7), "stop")
    content = [
        {"token": "token_id:5", "logprob": -0.625},
        {"token": "token_id:7", "logprob": -0.875},
    ]
    assert choice["logprobs"]["content"] == content
    assert last["choices"][0]["finish_reason"] == "stop"  # by a stop string


@pytest.mark.parametrize("is_last", [True, False])  # else the next prompt has no room
def test_a_limit_of_the_run_stops_the_episode_which_is_scored(is_last: bool) -> None:
    responses = []

    async def harness(episode: Episode) -> None:
        responses.append(await episode.serve(ask([1]), "agent"))
        responses.append(await episode.serve(ask([1, 5, 6]), "agent"))

    async def converse() -> None:
        episode = episode_of(harness)
        await episode.next_prompt()
        assert (await episode.next_prompt(turn(5, is_last=is_last))).is_done == is_last
        assert (await episode.end())["score"] == 0.25
        assert episode.traces["agent"].stopped == ["max_turns"]

    asyncio.run(converse())
    assert responses[0][1]["choices"][0]["finish_reason"] == ("length" if is_last else "stop")
    assert responses[1][0] == 400


@pytest.mark.parametrize(
    ("request_", "agent", "why"),
    [
        (
            ask([1, 5, 7, 8], temperature=1.0),
            "agent",
            "temperature=1.0: turns have temperature=0.5",
        ),
        (ask([1, 5, 7, 8], top_k=4), "agent", "top_k=4: turns have top_k=0"),
        (ask([1, 5, 7, 8], n=2), "agent", "n=2: turns have n=1"),
        (ask([1, 5, 7, 8], logprobs=5), "agent", "logprobs=5: turns have logprobs=1"),
        (ask([1, 5, 7, 8], min_p=0.1), "agent", "min_p=0.1: the engine has no such setting"),
        (ask([1, 5, 7, 8], seed=3), "agent", "seed=3: the engine has no such setting"),
        (ask([1, 5, 7, 8], max_tokens=8), "agent", "max_tokens=8: rollout.max_new_tokens=9 holds"),
        (ask([1, 5, 7, 8], stop_token_ids=[7, 3]), "agent", "stop_token_ids=[7, 3]: the run's"),
        ({**ask([1, 5, 7, 8]), "features": {}}, "agent", "features: the engine takes tokens alone"),
        (
            ask([1, 5, 6, 8]),
            "agent",
            "of 4 tokens does not extend the 3 tokens so far, from token 2",
        ),
        (ask([1, 5]), "agent", "of 2 tokens does not extend the 3 tokens so far, from token 2 on"),
        (ask([1, 5, 7, 8]), "other", "a second agent or a second attempt asks the policy"),
    ],
)
def test_other_requests_are_refused_by_name(request_: Any, agent: str, why: str) -> None:
    async def harness(episode: Episode) -> None:
        await episode.serve(ask([1]), "agent")
        status, response = await episode.serve(request_, agent)
        assert (status, why in response["error"]["message"]) == (400, True)
        await asyncio.sleep(1000)

    async def converse() -> None:
        episode = episode_of(harness)
        await episode.next_prompt()
        with pytest.raises(ValueError, match=r"^verifiers: ") as error:
            await episode.next_prompt(turn(5, 7))
        assert why in str(error.value)
        assert "\n" not in str(error.value)
        episode.cancel()

    asyncio.run(converse())


def test_a_second_agent_after_the_last_turn_is_refused_too() -> None:
    async def harness(episode: Episode) -> None:
        await episode.serve(ask([1]), "agent")
        await episode.serve(ask([2]), "other")

    async def converse() -> None:
        episode = episode_of(harness)
        await episode.next_prompt()
        await episode.next_prompt(turn(5, is_last=True))
        with pytest.raises(ValueError, match="a second agent or a second attempt asks the policy"):
            await episode.end()

    asyncio.run(converse())


def test_a_second_sample_and_an_episode_that_fails_are_named() -> None:
    async def asks_twice(episode: Episode) -> None:
        await asyncio.gather(*(episode.serve(ask([1]), "agent") for _ in range(2)))

    async def fails(episode: Episode) -> list[Any]:
        await episode.serve(ask([1]), "agent")
        return [SimpleNamespace(type="TaskError", message="no such file")]

    async def says_nothing(episode: Episode) -> None:
        pass

    async def converse() -> None:
        episode = episode_of(asks_twice)
        with pytest.raises(ValueError, match="a second sample is asked for while the policy"):
            await episode.next_prompt()
        episode.cancel()
        episode = episode_of(fails)
        await episode.next_prompt()
        with pytest.raises(ValueError, match="the episode failed: TaskError: no such file"):
            await episode.next_prompt(turn(5))
        with pytest.raises(ValueError, match="the episode failed: it asks for no turn"):
            await episode_of(says_nothing).next_prompt()

    asyncio.run(converse())


def test_without_verifiers_a_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = "tlt_megatron.rewards.verifiers_environment"
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ValueError, match=r"^needs verifiers 0.4: pip install 'tlt_megatron"):
        importlib.import_module(adapter)
