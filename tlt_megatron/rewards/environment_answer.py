"""The answers of the function of `rollout.environment` to the turns of a conversation. For reward
workers.

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

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tlt_megatron.types import Message

_MAX_BYTES = 1 << 19  # an observation's limit; half of what a worker may send at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of an environment to one turn."""

    observation: tuple[Message, ...]
    is_done: bool


def read_answer(result: object) -> Answer:
    """Return what the function returned, checked.

    ValueError if it is anything else than its signature says.
    """
    if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 2:
        raise ValueError(f"{_cut(result)}: must be a pair (observation, is_done)")
    observation, is_done = result
    if not isinstance(is_done, bool):
        raise ValueError(f"is_done={_cut(is_done)}: must be True or False")
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    if observation is None and is_done:
        observation = []
    if not isinstance(observation, Sequence):
        raise ValueError(f"observation={_cut(observation)}: must be text or a list of messages")
    for message in observation:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"observation: {_cut(message)} must be a message with the texts role and content"
            )
    try:
        num_bytes = len(json.dumps(observation, ensure_ascii=False).encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"observation: must be JSON in UTF-8: {error}") from error
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"observation: {num_bytes} bytes of JSON: at most {_MAX_BYTES}")
    return Answer(observation=tuple(observation), is_done=is_done)


def _cut(value: object) -> str:
    return repr(value)[:80]
