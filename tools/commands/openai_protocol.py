"""What a request of OpenAI's protocol may hold, and what a reply holds. For
`tools/commands/openai_server.py`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PositiveInt, ValidationError

from tlt_megatron.api.live_batch import Job, Response
from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.engines.embedded.scoring import TokenScore
from tlt_megatron.rewards.tool_calls import read_calls, text_before_calls
from tlt_megatron.trainer.before.conversation_checks import form_of
from tlt_megatron.types import FinishReason

MOST_SAMPLES = 128  # n, as in OpenAI's protocol
MOST_TOP = 20  # alternatives of a token, as in OpenAI's protocol
_COMPLETION_TOKENS = 16  # max_tokens of a completion without it, as in OpenAI's protocol
# Fields that this server does not have, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# Fields about the sender. They change no answer.
_WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key")


class StreamOptions(BaseModel, extra="forbid", strict=True):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampling(BaseModel, strict=True):
    """The fields of both kinds of requests."""

    model: str | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None  # replaces max_tokens
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0  # not OpenAI's; 0 and -1 keep all
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call."""
        return []

    def num_tokens(self, room: int) -> int:
        """Return the most tokens of a response. `room` is left by the longest prompt."""
        return self.max_completion_tokens or self.max_tokens or self._default_tokens(room)

    def _default_tokens(self, room: int) -> int:
        return max(1, room)


class TextRequest(Sampling):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None  # alternatives of each token

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_top(self) -> int | None:
        """Return the alternatives that a pass of its own must find; None: no such pass."""
        if self.logprobs is None or (self.logprobs == 0 and not self.echo):
            return None
        return self.logprobs

    def _default_tokens(self, room: int) -> int:
        return max(1, min(_COMPLETION_TOKENS, room))


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    # not OpenAI's; as of vLLM and SGLang
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] = 0

    @property
    def offered(self) -> list[dict[str, Any]]:
        return self.tools if self.tool_choice == "auto" else []

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs

    @property
    def num_top(self) -> int | None:
        """See `TextRequest`."""
        return self.top_logprobs if self.logprobs and self.top_logprobs else None


def read_request(body: Any, kind: type[Sampling]) -> Any:
    """Return a checked request. ValueError in one line for a field that is bad, unknown, or not
    supported.
    """
    if not isinstance(body, dict):
        raise ValueError(f"the body is {type(body).__name__}: must be a JSON object")
    fields = {}
    for key, value in body.items():
        if value is None or key in _WITHOUT_EFFECT:
            continue
        if key not in _NEUTRAL or key in kind.model_fields:
            fields[key] = value
        elif value not in _NEUTRAL[key]:
            allowed = " or ".join(f"{each!r}" for each in _NEUTRAL[key])
            raise ValueError(f"{key}={value!r:.80} is not supported: must be {allowed}")
    unknown = [key for key in fields if key not in kind.model_fields]
    if unknown:
        raise ValueError(f"{unknown[0]!r:.80}: this server has no such field")
    try:
        found = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        # without the types of a union
        name = ".".join(str(part) for part in first["loc"] if part != "str")
        given = "" if first["type"] == "missing" else f"={first['input']!r:.80}"
        raise ValueError(f"{name}{given}: {first['msg']}") from None
    if found.offered and body.get("parallel_tool_calls") is False:
        raise ValueError("parallel_tool_calls=False is not supported with tools")
    if isinstance(found, ChatRequest) and found.top_logprobs and not found.logprobs:
        raise ValueError(f"top_logprobs={found.top_logprobs}: needs logprobs=true")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Makes the replies to one request."""

    id: str
    model: str
    request: TextRequest | ChatRequest
    tokenizer: Tokenizer

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def whole(self, job: Job) -> dict[str, Any]:
        """Return the reply to a job that is over."""
        choices = []
        for index, one in enumerate(job.responses.values()):
            assert one.text is not None
            content: dict[str, Any] = {"text": self.echoed(job, one) + one.text.text}
            if self.is_chat:
                content = {"message": self._message(index, one, one.text.text)}
            choices.append(self._choice(index, content, one, 0))
        return self._frame(choices) | {"usage": self.usage(job)}

    def chunk(
        self, index: int, piece: str, response: Response, first: int | None
    ) -> dict[str, Any]:
        """Return a chunk of a stream: a `piece` of text, and the tokens from `first` on, None for
        the first chunk of the choice.
        """
        content: dict[str, Any] = {"text": piece}
        if self.is_chat:
            message = self._message(index, response, piece)
            if first is not None:
                del message["role"]
            content = {"delta": message}
        return self._frame([self._choice(index, content, response, first or 0)], is_chunk=True)

    def _message(self, index: int, response: Response, text: str) -> dict[str, Any]:
        """Return the turn of the assistant. Where there are tools, `text` is whole."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if not self.request.offered or response.finish_reason is None:
            return message
        whole, form = self.tokenizer.decode_turn(response.token_ids), form_of(self.tokenizer)
        calls = read_calls(whole, form, self.request.offered)
        if not calls or any(call.error for call in calls):
            return message
        message["tool_calls"] = [
            {
                "index": number,
                "id": call.id or _call_id(f"{self.id} {index} {number}"),
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
        before = text_before_calls(whole, form)
        for special in self.tokenizer.hf.all_special_tokens:  # as in `text`
            before = before.replace(special, "")
        return message | {"content": before or None}

    def last_chunk(self, job: Job) -> dict[str, Any]:
        """Return the chunk with the usage."""
        return self._frame([], is_chunk=True) | {"usage": self.usage(job)}

    def echoed(self, job: Job, response: Response) -> str:
        """Return the text before a completion: the prompt, if the request wants it."""
        if not isinstance(self.request, TextRequest) or not self.request.echo:
            return ""
        return self.tokenizer.decode(job.prompts[response.prompt_index].token_ids)

    def _frame(self, choices: list[dict[str, Any]], *, is_chunk: bool = False) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if is_chunk and self.is_chat else kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, index: int, content: dict[str, Any], response: Response, first: int
    ) -> dict[str, Any]:
        reason = response.finish_reason
        turn = content.get("message") or content.get("delta") or {}
        if reason is FinishReason.STOP and "tool_calls" in turn:
            reason = "tool_calls"
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(response, first) if self.request.has_logprobs else None,
            "finish_reason": None if reason is None else str(reason),
        }

    def _logprobs(self, response: Response, first: int) -> dict[str, Any]:
        """Return the log-probs of the tokens from `first` on, at temperature 1 without a cut. With
        `echo` they begin with the prompt, whose first token has none.
        """
        token_ids, values = response.token_ids[first:], response.policy_logprobs[first:]
        scores: list[TokenScore | None] = [None] * len(token_ids)
        if response.scores:
            scores = list(response.scores[-len(token_ids) :])
            if isinstance(self.request, TextRequest) and self.request.echo:
                token_ids, scores = [*response.prompt_ids, *token_ids], [None, *response.scores]
            values = [None if score is None else score.logprob for score in scores]
        texts = [self._text(token_id) for token_id in token_ids]
        tops = [
            [] if score is None else [(self._text(one), value) for one, value in score.top]
            for score in scores
        ]
        if not self.is_chat:
            starts = accumulate(map(len, texts), initial=0)
            return {
                "tokens": texts,
                "token_logprobs": values,
                "top_logprobs": [dict(top) or None for top in tops] if any(tops) else None,
                "text_offset": list(starts)[:-1],
            }
        content = [
            {**_entry(text, value), "top_logprobs": [_entry(*one) for one in top]}
            for text, value, top in zip(texts, values, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def usage(self, job: Job) -> dict[str, Any]:
        """Return the tokens of a job. `accept_length` is not OpenAI's: tokens out per verify
        pass.
        """
        responses = job.responses.values()
        num_prompt = sum(len(prompt.token_ids) for prompt in job.prompts)
        num_drawn = sum(len(response.token_ids) for response in responses)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_drawn,
            "total_tokens": num_prompt + num_drawn,
        }
        lengths = [length for response in responses for length in response.accept_lengths]
        if lengths:
            usage["accept_length"] = sum(lengths) / len(lengths)
        return usage


def _call_id(place: str) -> str:
    """Return the id of a call. Templates of Mistral want nine characters."""
    return hashlib.sha256(place.encode()).hexdigest()[:9]


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def model_card(name: str, created: int) -> dict[str, Any]:
    """Return a model as /v1/models shows it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "local"}


def error_body(message: str, code: int, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape, in one line."""
    kind = "server_error" if code >= 500 else "invalid_request_error"
    line = " ".join(message.split())
    return {"error": {"message": line, "type": kind, "param": param, "code": None}}


def as_given(prompt: str | list[Any]) -> Sequence[Any]:
    """Return the prompts of /v1/completions: one text, one list of ids, or several of them."""
    if isinstance(prompt, str) or (prompt and not isinstance(prompt[0], str | list)):
        return [prompt]
    return prompt
