"""A tiny model with a chat template, and `tlt serve`'s application over it in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from tests.ranks import LIMIT_S
from tests.tiny_task import make_tiny_task
from tlt_megatron import Engine
from tools.commands.openai_server import Bounds, make_app
from tools.commands.serve import server_config

TEMPLATE = "{{ mode }}{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}a:"


def make_chat_model(folder: Path) -> Path:
    """Write the model of `make_tiny_task` with a chat template. Return its folder."""
    model = make_tiny_task(folder).parent / "model"
    settings = model / "tokenizer_config.json"
    given = json.loads(settings.read_text())
    settings.write_text(json.dumps(given | {"chat_template": TEMPLATE}))
    return model


@contextlib.contextmanager
def serving(engine: Engine, bounds: Bounds | None = None) -> Iterator[str]:
    """Serve on a free port, as `tlt serve` does. Gives the address; the engine is closed."""
    server = uvicorn.Server(server_config(make_app(engine, "tiny", bounds), "127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as place:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[place])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{place.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def tokens_until(stop: str, token_ids: list[int], engine: Engine) -> int:
    """The number of tokens until the text holds `stop`."""
    counts = range(1, len(token_ids) + 1)
    return next(n for n in counts if stop in engine.tokenizer.decode(token_ids[:n]))


def post(address: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/v1/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return 200, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def get(address: str, path: str, **headers: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{address}{path}", headers=headers), timeout=LIMIT_S
        ) as reply:
            return 200, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def stream(address: str, path: str, **body: Any) -> Iterator[dict[str, Any]]:
    """Yield the content of each event."""
    data = json.dumps({"stream": True, **body}).encode()
    request = urllib.request.Request(f"{address}/v1/{path}", data)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def wait_until_idle(address: str) -> None:
    until = time.monotonic() + LIMIT_S
    while get(address, "/health")[1]["open_responses"]:
        assert time.monotonic() < until, "responses of clients that left are open"
        time.sleep(0.02)
