"""The answers of `rollout.environment` to the turns of a conversation: those of a function, and
those of a class with state, which `environment.py` describes. For reward workers.

    def answer(messages, data_source, ground_truth, extra_info) -> tuple[observation, is_done]

`messages` is the whole conversation: the prompt, every turn of the policy (role assistant) and
every observation so far. The observation is a text, which becomes one message of the role user, or
a list of messages. `is_done` ends the conversation, and its observation is dropped. The function
may be `async def`; a worker then answers many turns at once.

The function keeps nothing between two turns: any worker process may answer the next one. A state
belongs in the messages, as a further key of an observation, which comes back with the next turn:
{"role": "tool", "content": "ok", "session": 7}.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tlt_megatron.rewards.environment import Step, ToolCall, Turn
from tlt_megatron.rewards.reward import MAX_ABS_REWARD, read_number, read_result
from tlt_megatron.types import Message

_MAX_BYTES = 1 << 19  # an answer's limit; half of what a worker may send at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of an environment to one turn, or the messages and tools of its start."""

    observation: tuple[Message, ...] = ()
    is_done: bool = False
    reward: float = 0.0
    stop: tuple[str, ...] | None = None  # see `Step`
    tools: tuple[Mapping[str, object], ...] = ()  # of the start
    token_ids: tuple[int, ...] | None = None  # see `Step`; of the start: the whole prompt


def read_answer(result: object) -> Answer:
    """Return what a function returned, checked.

    ValueError if it is anything else than its signature says.
    """
    if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 2:
        raise ValueError(f"{_cut(result)}: must be a pair (observation, is_done)")
    observation, is_done = result
    return make_answer(observation, is_done)


def make_answer(
    observation: object,
    is_done: object = False,
    reward: object = 0.0,
    stop: object = None,
    tools: object = (),
    token_ids: object = None,
) -> Answer:
    """Return the answer. ValueError if a part of it is not as `Answer` says."""
    if type(is_done).__name__ not in ("bool", "bool_"):  # also NumPy's
        raise ValueError(f"is_done={_cut(is_done)}: must be True or False")
    is_done = bool(is_done)
    if observation is None and is_done:
        observation = ()
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    if not isinstance(observation, Sequence):
        raise ValueError(f"observation={_cut(observation)}: must be text or a list of messages")
    for message in observation:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"observation: {_cut(message)} must be a message with the texts role and content"
            )
    stop = (stop,) if isinstance(stop, str) else stop
    if stop is not None and not _is_list(stop, str):
        raise ValueError(f"stop={_cut(stop)}: must be a list of texts, or None")
    if not _is_list(tools, Mapping):
        raise ValueError(f"tools={_cut(tools)}: must be a list of OpenAI schemas")
    if token_ids is not None and not _is_list(token_ids, int, is_kept=lambda each: each >= 0):
        raise ValueError(f"token_ids={_cut(token_ids)}: must be a list of token ids, or None")
    answer = Answer(
        observation=tuple(observation),
        is_done=is_done,
        reward=read_number("reward", reward, MAX_ABS_REWARD),
        stop=None if stop is None else tuple(stop),  # type: ignore[arg-type]
        tools=tuple(tools),  # type: ignore[arg-type]
        token_ids=None if token_ids is None else tuple(token_ids),  # type: ignore[arg-type]
    )
    try:
        parts = filter(None, (answer.observation, answer.tools, answer.stop, answer.token_ids))
        num_bytes = sum(len(json.dumps(part, ensure_ascii=False).encode()) for part in parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"observation: must be JSON in UTF-8: {error}") from error
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"observation: {num_bytes} bytes of JSON: at most {_MAX_BYTES}")
    return answer


class Environments:
    """The environments of all conversations that one worker has."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._open: dict[int, Any] = {}

    async def call(
        self, function: str, conversation: int, arguments: Mapping[str, Any]
    ) -> dict[str, object]:
        """Call `start`, `step` or `end`. Return the result as fields of `worker_process.Outcome`.

        The environment is dropped at its end, and when a method fails.
        """
        if function == "start":
            self._open[conversation] = self._make()
        environment = self._open[conversation]
        try:
            if function == "step":
                step = await _result(environment.step(_turn(arguments)))
                if not isinstance(step, Step):
                    raise ValueError(f"step returned {_cut(step)}: must be a Step")
                given = step.messages, step.is_done, step.reward, step.stop
                return {"answer": asdict(make_answer(*given, token_ids=step.token_ids))}
            method = getattr(environment, function, None)
            found = None if method is None else await _result(method(**arguments))
            if function == "start":
                given = found if isinstance(found, Step) else Step(() if found is None else found)
                if given != Step(given.messages, token_ids=given.token_ids):
                    raise ValueError(f"start returned {_cut(given)}: only messages and token_ids")
                tools = getattr(environment, "tools", ())
                answer = make_answer(given.messages, tools=tools, token_ids=given.token_ids)
                return {"answer": asdict(answer)}
            del self._open[conversation]
            score, details = read_result(_with_score(found))
            return {"score": score, "details": details}
        except BaseException:
            self._open.pop(conversation, None)
            raise


def _turn(arguments: Mapping[str, Any]) -> Turn:
    calls = tuple(ToolCall(**call) for call in arguments["tool_calls"])
    lists = {key: tuple(arguments[key]) for key in ("token_ids", "messages", "logprobs")}
    return Turn(**{**arguments, **lists, "tool_calls": calls})


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _with_score(found: object) -> object:
    """Return the result of `end`, in which a score may be missing, as a reward's result."""
    if isinstance(found, Mapping):
        return {"score": 0.0, **found}
    return 0.0 if found is None else found


def score_conversation(
    turn_rewards: Sequence[float], end: Mapping[str, float]
) -> Mapping[str, float]:
    """The reward function `environment`: the rewards of all turns and of the end."""
    return {**end, "score": math.fsum((*turn_rewards, end.get("score", 0.0)))}


def _is_list(value: object, kind: type, is_kept: Callable[[Any], object] = bool) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return all(isinstance(each, kind) and is_kept(each) for each in value)


def _cut(value: object) -> str:
    return repr(value)[:80]
