"""Bounds of `tlt serve`: how much clients may ask for, how long they may take, and for which
host.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.ranks import LIMIT_S
from tests.served_model import get, make_chat_model, post, serving, stream, wait_until_idle
from tlt_megatron import Engine
from tools.commands import server_bounds
from tools.commands.openai_server import Bounds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    engine = Engine(model, max_batch_size=8, max_tokens=512)
    with serving(engine, Bounds(num_open=300)) as address:
        yield address


def test_more_than_the_server_takes_is_refused_at_once(address: str) -> None:
    events = stream(address, "completions", prompt=["1"] * 3, max_tokens=500, n=100, seed=1)
    next(events)
    code, reply = post(address, "completions", {"prompt": "1", "n": 120})
    assert code == 503
    assert "responses are open, at most 300 may be: try again later" in reply["error"]["message"]
    events.close()
    wait_until_idle(address)


def test_who_waits_too_long_is_told(model: Path) -> None:
    engine = Engine(model, max_batch_size=1, max_tokens=512)
    with serving(engine, Bounds(wait_s=6)) as address:
        events = stream(address, "completions", prompt="1", max_tokens=500, n=100, seed=1)
        next(events)
        code, reply = post(address, "completions", {"prompt": "1"})
        events.close()
        wait_until_idle(address)
    assert (code, reply["error"]["message"]) == (
        503,
        "no token within 6 s: the server is busy, try later",
    )


def raw(address: str, text: bytes) -> bytes:
    """Send bytes and return what comes until the server closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(text)
        return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: loc",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n{",
    ],
)
def test_half_a_request_is_closed(address: str, sent: bytes, monkeypatch) -> None:
    monkeypatch.setattr(server_bounds, "REQUEST_S", 3.0)
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda _: raw(address, sent), range(30)))
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
    assert all(b"no complete " in answer for answer in answers)


def test_the_second_request_of_a_connection_is_bounded_too(address: str, monkeypatch) -> None:
    monkeypatch.setattr(server_bounds, "REQUEST_S", 3.0)
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /health HTTP")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert b"HTTP/1.1 408 " in answer


def test_too_many_connections_are_refused(address: str, monkeypatch) -> None:
    monkeypatch.setattr(server_bounds, "NUM_CONNECTIONS", 3)
    host, port = address.removeprefix("http://").split(":")
    held = [socket.create_connection((host, int(port))) for _ in range(3)]
    try:
        time.sleep(0.2)
        assert b"503 " in raw(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[:20]
    finally:
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    "host, code",
    [
        ("evil.com", 403),
        ("127.0.0.1.evil.com:80", 403),
        ("", 403),
        ("localhost:1", 200),
        ("[::1]:5", 200),
    ],
)
def test_another_host_is_refused(address: str, host: str, code: int) -> None:
    found, reply = get(address, "/health", Host=host)
    assert found == code
    assert ("error" in reply) == (code == 403)


@pytest.mark.parametrize(
    "bound, host, allowed",
    [
        ("0.0.0.0", "10.0.0.7:80", True),
        ("0.0.0.0", "evil.com", False),
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.0.7", "10.0.0.8", False),
        ("box.example", "BOX.example:80", True),
    ],
)
def test_the_bound_host_is_served(bound: str, host: str, allowed: bool) -> None:
    assert server_bounds.Guard(None, bound)._allows(host) == allowed  # pyright: ignore[reportArgumentType]
