"""The adapters of examples/ over small classes with the methods of other trainers' environments,
and the search.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from examples.environments_of_others import (
    from_openenv,
    from_skyrl,
    from_torchtitan,
    from_trl,
)
from examples.lookup import Lookup
from examples.search import Search
from tlt_megatron import ToolCall, Turn
from tlt_megatron.rewards.environment_answer import Environments

ROW = {
    "data_source": "",
    "ground_truth": "40",
    "extra_info": {"goal": 3},
    "messages": [{"role": "system", "content": "Count."}],
}
closed: list[object] = []


class SkyRLEnv:
    def __init__(self, goal: int) -> None:
        self.goal = goal

    def init(self, prompt: list[dict]) -> tuple[list[dict], dict]:
        return [*prompt, {"role": "user", "content": "Begin."}], {}

    def step(self, action: str) -> dict[str, Any]:
        done = len(action) == self.goal
        text = [{"role": "user", "content": "again"}]
        action = action.strip()
        return {
            "observations": text,
            "reward": float(done),
            "done": done,
            "metadata": {},
            "postprocessed_action": action,
        }

    def close(self) -> None:
        closed.append(self)


class TorchtitanEnv:
    async def init(self) -> tuple[list[dict], list[dict]]:
        return [{"role": "user", "content": "Begin."}], [{"type": "function"}]

    async def step(self, message: dict) -> tuple[list[dict], bool, dict[str, float]]:
        await asyncio.sleep(0)
        done = message["content"] == "abc"
        return [{"role": "user", "content": "again"}], done, {"right": float(done), "form": 0.5}

    async def close(self) -> None:
        closed.append(self)


class TrlEnv:
    def reset(self, goal: int, **_: object) -> str:
        self.goal, self.count = goal, 0
        return "Begin."

    def add(self, amount: int) -> str:
        """Add to the count.

        Args:
            amount: how much to add
        """
        self.count += amount
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count == self.goal)


class OpenEnvClient:
    def reset(self, seed: int) -> SimpleNamespace:
        self.goal = seed
        return SimpleNamespace(observation=SimpleNamespace(text="Begin."), reward=None, done=False)

    def step(self, action: dict) -> SimpleNamespace:
        done = action["size"] == self.goal
        reward = 1.0 if done else None
        return SimpleNamespace(observation=SimpleNamespace(text="again"), reward=reward, done=done)

    def close(self) -> None:
        closed.append(self)


def play(make: Any, turns: list[dict[str, Any]]) -> tuple[list[object], dict[str, object]]:
    """Return the fields of all answers of a conversation, and those of its end."""
    environments = Environments(make)

    async def run() -> tuple[list[object], dict[str, object]]:
        found = [await environments.call("start", 1, {"row": ROW, "seed": 3})]
        for turn in turns:
            own = {"token_ids": [], "logprobs": [], "tool_calls": [], "is_last": False, **turn}
            own["messages"] = [{"role": "assistant", "content": turn["text"]}]
            found.append(await environments.call("step", 1, own))
        return [each["answer"] for each in found], await environments.call("end", 1, {})

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("make", "last_reward"),
    [
        (from_skyrl(lambda row: SkyRLEnv(row["extra_info"]["goal"])), 1.0),
        (from_torchtitan(lambda row, seed: TorchtitanEnv()), 1.5),
        (from_openenv(OpenEnvClient, lambda text: {"size": len(text)}, lambda o: o.text), 1.0),
    ],
    ids=["skyrl", "torchtitan", "openenv"],
)
def test_environments_of_others_play(make: Any, last_reward: float) -> None:
    closed.clear()
    (start, first, last), end = play(make, [{"text": "a"}, {"text": "abc"}])
    assert [message["content"] for message in start["observation"]] == ["Begin."]
    assert [message["content"] for message in first["observation"]] == ["again"]
    assert (first["is_done"], last["is_done"], last["reward"]) == (False, True, last_reward)
    assert end == {"score": 0.0, "details": {}}
    assert len(closed) == 1


def test_methods_of_trl_are_tools() -> None:
    good, bad = ({"name": name, "arguments": {"amount": 3}, "id": ""} for name in ("add", "none"))
    turns = [{"text": "", "tool_calls": [good, bad]}, {"text": "done"}]
    (start, first, last), end = play(from_trl(TrlEnv), turns)
    assert [tool["function"]["name"] for tool in start["tools"]] == ["add"]
    assert first["observation"][0]["content"] == "3"
    assert "Error" in first["observation"][1]["content"]
    assert (last["is_done"], end["score"]) == (True, 1.0)


def test_a_turn_that_the_environment_edits_is_refused() -> None:
    with pytest.raises(ValueError, match="edits the policy's turn"):
        play(from_skyrl(lambda row: SkyRLEnv(3)), [{"text": "ab "}])


def test_a_search_pays_the_distance_that_a_turn_closes() -> None:
    search = Search()
    search.start(ROW, seed=1)
    steps = [search.step(Turn(text)) for text in ("none", "30", "10", "60", "it is 40")]
    assert [step.reward for step in steps] == [0, 0.75, 0, 0, 0.25]
    assert [step.is_done for step in steps] == [False] * 4 + [True]
    assert search.end() == {"open_part": 0.0, "turns": 5}
    assert ToolCall("a").arguments == {}


def test_a_lookup_pays_half_for_the_call_and_half_for_the_answer() -> None:
    lookup = Lookup()
    lookup.start({"ground_truth": "3901"}, 5)
    wrong, right = (
        Turn("", tool_calls=(ToolCall("calculate", {"expression": e}),)) for e in ("7*", "47*83")
    )
    [message] = lookup.step(wrong).messages
    assert str(message["content"]).startswith("Error: ")
    steps = [lookup.step(turn) for turn in (right, right, Turn("####3901"))]
    assert [(step.reward, step.is_done) for step in steps] == [
        (0.5, False),
        (0, False),
        (0.5, True),
    ]
    assert steps[0].messages == [{"role": "tool", "content": "3901"}]
    assert lookup.end() == {"found": 1}
