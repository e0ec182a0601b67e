"""The protocol of OpenAI over an `Engine`: /v1/completions, /v1/chat/completions, /v1/models and
/health. For `tlt serve`.

Every request joins the running batch. A client that leaves is cancelled within a pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as AnyHttpError
from starlette.requests import ClientDisconnect

from tlt_megatron.api.live_batch import Job
from tlt_megatron.api.text_engine import Engine
from tlt_megatron.saved_files import parse_json
from tools.commands.openai_protocol import (
    ChatRequest,
    Replies,
    Sampling,
    TextRequest,
    as_given,
    error_body,
    model_card,
    read_request,
)

_ENCODERS = 2  # requests whose prompts are encoded at once: long ones take much memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much clients may ask for."""

    body_bytes: int = 1 << 20
    num_open: int = 1024  # responses that wait or run
    wait_s: float = 600.0  # until the first token


@dataclass(slots=True, eq=False)
class _Client:
    """One request. Its loop waits for tokens and for the end of its job."""

    job: Job
    replies: Replies
    news: asyncio.Event


class Service:
    """Answers requests with one engine."""

    def __init__(self, engine: Engine, name: str, bounds: Bounds) -> None:
        """`name` is the model's id in answers."""
        self.engine = engine
        self.name = name
        self._bounds = bounds
        self._started_s = int(time.time())
        self._numbers = itertools.count()
        self._encoders = asyncio.Semaphore(_ENCODERS)

    async def answer(self, request: Request, kind: type[Sampling]) -> Response:
        """Answer one request, or stop as soon as the client has left."""
        asked = read_request(await self._read_body(request), kind)
        client = await self._submit(asked)
        stays = False
        try:
            while await self._is_there(client, request):
                if asked.stream:
                    stays = True
                    return StreamingResponse(self._stream(client), media_type="text/event-stream")
                if client.job.is_over:
                    return JSONResponse(client.replies.whole(client.job))
            return Response(status_code=499)  # the client has left: nobody reads it
        finally:
            if not stays:
                self.engine.batch.cancel(client.job)

    async def _read_body(self, request: Request) -> Any:
        """Return the JSON of a request. ValueError for one that is too large or no JSON."""
        body, most = bytearray(), self._bounds.body_bytes
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise HTTPException(413, f"the body is larger than {most} bytes, the most here")
        try:
            return parse_json(bytes(body))
        except ValueError as error:
            raise ValueError(f"the body is no JSON: {error}") from None

    async def _submit(self, asked: TextRequest | ChatRequest) -> _Client:
        """Let a request join the batch. HTTPException 503 if too much is open."""
        is_chat = isinstance(asked, ChatRequest)
        prompts = [asked.messages] if is_chat else as_given(asked.prompt)
        named = asked.chat_template_kwargs if is_chat else {}
        engine, most, num_new = self.engine, self._bounds.num_open, len(prompts) * asked.n
        if not 1 <= num_new <= most:
            raise ValueError(
                f"{len(prompts)} prompts with n={asked.n} are {num_new} responses: must be 1 to {most}"
            )
        if asked.stream and asked.num_top is not None:
            raise ValueError(
                "stream=True with alternatives of tokens or log-probs of a prompt is not supported"
            )
        async with self._encoders:
            name = "messages" if is_chat else "prompts[{}]"
            encoded = await run_in_threadpool(engine.encode, prompts, name, named, asked.offered)
        room = engine.max_tokens - max(map(len, encoded))
        params = engine.sampling(
            asked.seed,
            max_new_tokens=asked.num_tokens(room),
            num_samples=asked.n,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(0, asked.top_k),
        )
        loop, news, is_told = asyncio.get_running_loop(), asyncio.Event(), False

        def on_news(job: Job) -> None:  # in the thread of the batch
            nonlocal is_told
            if asked.stream or job.is_over or not is_told:
                is_told = True
                with contextlib.suppress(RuntimeError):  # the loop of a server that ends is closed
                    loop.call_soon_threadsafe(news.set)

        job = engine.job(
            encoded,
            params,
            stop=asked.stop,
            on_news=on_news,
            is_read=True,
            num_top=asked.num_top,
        )
        num_open = engine.batch.num_open
        if num_open + num_new > most:
            raise HTTPException(
                503, f"{num_open} responses are open, at most {most} may be: try again later"
            )
        engine.batch.submit(job)
        number = f"tlt-{self._started_s}-{next(self._numbers)}"
        replies = Replies(id=number, model=self.name, request=asked, tokenizer=engine.tokenizer)
        return _Client(job, replies, news)

    async def _is_there(self, client: _Client, request: Request) -> bool:
        """Wait for tokens or the end. Return False if the client leaves first.

        HTTPException if the first token does not come in time, or the engine has failed.
        """
        limit = None if client.job.has_begun else self._bounds.wait_s
        tasks = [asyncio.create_task(client.news.wait()), asyncio.create_task(_leave(request))]
        try:
            done, _ = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if not done:
            raise HTTPException(503, f"no token within {limit:g} s: the server is busy, try later")
        client.news.clear()
        if client.job.error is not None:
            raise HTTPException(500, f"the engine has failed: {client.job.error}")
        return tasks[0] in done

    async def _stream(self, client: _Client) -> AsyncIterator[str]:
        """Yield server-sent events. It is closed when the client leaves."""
        job, replies, batch = client.job, client.replies, self.engine.batch
        num_sent: dict[int, int] = {}  # tokens of each choice; a choice that has ended is not open
        open_ = dict(enumerate(job.responses.values()))
        try:
            while open_:
                chunks = []
                with batch.lock:
                    for index, response in list(open_.items()):
                        is_ended = response.finish_reason is not None
                        assert response.text is not None
                        if replies.request.offered and not is_ended:
                            continue  # a call is sent as a whole
                        piece = response.text.take(is_ended=is_ended)
                        if not piece and not is_ended:
                            continue
                        if index not in num_sent:
                            piece = replies.echoed(job, response) + piece
                        first = num_sent.get(index)
                        chunks.append(replies.chunk(index, piece, response, first))
                        num_sent[index] = len(response.token_ids)
                        if is_ended:
                            del open_[index]
                for chunk in chunks:
                    yield _event(chunk)
                if open_:
                    await client.news.wait()
                    client.news.clear()
                if job.error is not None:
                    yield _event(error_body(f"the engine has failed: {job.error}", 500))
                    return
            if replies.request.stream_options.include_usage:
                yield _event(replies.last_chunk(job))
            yield "data: [DONE]\n\n"
        finally:
            batch.cancel(job)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _leave(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(engine: Engine, name: str, bounds: Bounds | None = None) -> FastAPI:
    """Return the application. `name` is the model's id in answers."""
    service = Service(engine, name, bounds or Bounds())
    card = model_card(name, int(time.time()))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title="tlt_megatron", lifespan=lifespan, docs_url=None, redoc_url=None)

    def failure(text: str, code: int) -> Response:
        """Return an error, without the folder of this machine."""
        return JSONResponse(error_body(text.replace(str(engine.tokenizer.path), name), code), code)

    @app.exception_handler(ValueError)
    def refuse(_: Request, error: ValueError) -> Response:
        return failure(str(error), 400)

    @app.exception_handler(AnyHttpError)
    def refuse_http(_: Request, error: AnyHttpError) -> Response:
        body = error_body(error.detail, error.status_code)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    def forget(_: Request, error: ClientDisconnect) -> Response:  # noqa: ARG001
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)  # it is raised again, for the log
    def fail(_: Request, error: Exception) -> Response:
        return failure(f"the server has failed: {error!r}", 500)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "open_responses": engine.batch.num_open}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    def model(model: str) -> dict[str, Any]:
        if model != name:
            raise HTTPException(
                404, f"model={model!r:.80} does not exist: this server has {name!r}"
            )
        return card

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await service.answer(request, TextRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.answer(request, ChatRequest)

    return app
