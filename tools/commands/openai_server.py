"""The protocol of OpenAI over an `Engine`: /v1/models, /v1/completions and /v1/chat/completions.
For `tlt serve`.

It is for trying a model: the engine answers one request at a time, and a stream has one piece for
each choice.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field, PositiveInt

from tlt_megatron.api.text_engine import Completion, Engine, TextPrompt


class Sampling(BaseModel, extra="forbid"):
    """What both kinds of requests may hold. Another field is refused: it would be ignored."""

    model: str | None = None
    max_tokens: PositiveInt = 256
    max_completion_tokens: PositiveInt | None = None  # replaces max_tokens
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0)] = 0
    n: PositiveInt = 1
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    user: str | None = None


class TextRequest(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]


class ChatRequest(Sampling):
    messages: list[dict[str, Any]]


def make_app(engine: Engine, name: str) -> FastAPI:
    """Return the application. `name` is the model's id in answers."""
    app, lock = FastAPI(title="tlt_megatron"), threading.Lock()

    @app.exception_handler(ValueError)
    def refuse(request: Request, error: ValueError) -> Response:  # noqa: ARG001
        content = {"error": {"message": str(error), "type": "invalid_request_error"}}
        return JSONResponse(content, status_code=400)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "local"}]}

    def answer(prompts: list[TextPrompt], request: Sampling) -> Response:
        with lock:
            found = engine.generate(
                prompts,
                max_new_tokens=request.max_completion_tokens or request.max_tokens,
                num_samples=request.n,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                seed=request.seed,
            )
        is_chat = isinstance(request, ChatRequest)
        reply = make_reply(found, name, is_chat=is_chat)
        if request.stream:
            return StreamingResponse(stream(reply, is_chat=is_chat), media_type="text/event-stream")
        return JSONResponse(reply)

    @app.post("/v1/completions")
    def complete(request: TextRequest) -> Response:
        given = request.prompt
        is_one = isinstance(given, str) or isinstance(given[0] if given else "", int)
        return answer([given] if is_one else given, request)  # pyright: ignore[reportArgumentType]

    @app.post("/v1/chat/completions")
    def chat(request: ChatRequest) -> Response:
        return answer([request.messages], request)

    return app


def make_reply(found: list[Completion], name: str, *, is_chat: bool) -> dict[str, Any]:
    """Return the answer to a request. `usage.accept_length` is not OpenAI's: tokens out per verify
    pass.
    """
    choices: list[dict[str, Any]] = []
    for index, one in enumerate(found):
        message = {"role": "assistant", "content": one.text}
        content = {"message": message} if is_chat else {"text": one.text}
        choices.append({"index": index, "finish_reason": one.finish_reason, **content})
    lengths = [length for one in found for length in one.accept_lengths]
    usage: dict[str, float] = {"completion_tokens": sum(len(one.token_ids) for one in found)}
    if lengths:
        usage["accept_length"] = sum(lengths) / len(lengths)
    return {
        "id": f"tlt-{time.time_ns()}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": name,
        "choices": choices,
        "usage": usage,
    }


def stream(reply: dict[str, Any], *, is_chat: bool) -> Iterator[str]:
    """Yield a reply as server-sent events."""
    kind = "chat.completion.chunk" if is_chat else reply["object"]
    for choice in reply["choices"]:
        piece = dict(choice)
        if is_chat:
            piece["delta"] = piece.pop("message")
        yield f"data: {json.dumps(reply | {'object': kind, 'choices': [piece]})}\n\n"
    yield "data: [DONE]\n\n"
