"""Adapters for environments that were written for other trainers. Each returns a class for
`rollout.environment`. Copy the one that you need into a file of yours, and give the class a name:

    Gsm8k = from_skyrl(lambda row: skyrl_gym.make("gsm8k", env_config={}, extras=row["extra_info"]))

Then `rollout.environment=my_env.py:Gsm8k` and `reward.function=environment`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tlt_megatron import Environment, Step, Turn

Row = Mapping[str, Any]


def from_skyrl(make: Callable[[Row], Any]) -> type[Environment]:
    """SkyRL-gym: `init(prompt)`, `step(text)` and `close()`."""

    class SkyRL(Environment):
        def start(self, row: Row, seed: int) -> Any:
            self.env = make(row)
            messages, _ = self.env.init(list(row["messages"]))
            return messages[len(row["messages"]) :]

        def step(self, turn: Turn) -> Step:
            out = self.env.step(turn.text)
            if out.get("postprocessed_action") not in (None, turn.text):
                raise ValueError("the environment edits the policy's turn, which training cannot")
            return Step(out["observations"], reward=out["reward"], is_done=out["done"])

        def end(self) -> None:
            self.env.close()

    return SkyRL


def from_torchtitan(make: Callable[[Row, int], Any]) -> type[Environment]:
    """torchtitan: async `init()`, `step(message)` and `close()`. The messages of `init` follow the
    row's prompt, such as a system message.
    """

    class Torchtitan(Environment):
        async def start(self, row: Row, seed: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.env = make(row, seed)
            messages, self.tools = await self.env.init()
            return messages

        async def step(self, turn: Turn) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
            messages, is_done, rewards = await self.env.step(turn.messages[-1])
            return Step(messages, reward=sum(rewards.values()), is_done=is_done)

        async def end(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            await self.env.close()

    return Torchtitan


def from_trl(environment_factory: Callable[[], Any]) -> type[Environment]:
    """TRL's `environment_factory`: `reset(**row)`, public methods as tools, `get_reward()`."""

    class Trl(Environment):
        def start(self, row: Row, seed: int) -> Any:
            from transformers.utils import get_json_schema

            self.env = environment_factory()
            methods = inspect.getmembers(self.env, inspect.ismethod)
            hidden = ("reset", "get_reward")
            self.calls = {k: m for k, m in methods if k[0] != "_" and k not in hidden}
            self.tools = [get_json_schema(method) for method in self.calls.values()]
            return self.env.reset(**row["extra_info"])

        def step(self, turn: Turn) -> Step:
            def run(call: Any) -> str:
                try:
                    return str(self.calls[call.name](**call.arguments))
                except Exception as error:  # the policy reads it, as with TRL
                    return f"Error: {error!r}"

            answers = [{"role": "tool", "name": c.name, "content": run(c)} for c in turn.tool_calls]
            return Step(answers, is_done=not answers)

        def end(self) -> Any:
            return self.env.get_reward()

    return Trl


def from_openenv(
    make: Callable[[], Any], to_action: Callable[[str], Any], to_text: Callable[[Any], str]
) -> type[Environment]:
    """OpenEnv: `reset(seed=...)`, `step(action)` and `close()` of a synchronous client. `to_action`
    makes an action of a turn's text, and `to_text` a text of an observation.
    """

    class OpenEnv(Environment):
        def start(self, row: Row, seed: int) -> str:
            self.env = make()
            return to_text(self.env.reset(seed=seed).observation)

        def step(self, turn: Turn) -> Step:
            result = self.env.step(to_action(turn.text))
            return Step(
                to_text(result.observation), reward=result.reward or 0.0, is_done=result.done
            )

        def end(self) -> None:
            self.env.close()

    return OpenEnv
