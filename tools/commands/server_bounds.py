"""Bounds on the connections of `tlt serve`: their number, the time of a request to arrive, and the
host that it names.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from tools.commands.openai_protocol import error_body

NUM_CONNECTIONS = 512
REQUEST_S = 30.0  # for the head of a request, and for its body
SEND_S = 60.0  # for a client to take what was sent
_LINGER_S = 1.0  # for a client to read why it is refused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


class BoundedHttp(H11Protocol):
    """uvicorn's protocol, which closes connections whose request does not arrive.

    uvicorn itself waits for the head of a request forever.
    """

    _deadline: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > NUM_CONNECTIONS:
            self._refuse(503, f"{NUM_CONNECTIONS} connections are open, the most here: try later")
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if not self._is_answering:
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._deadline is not None:  # it was for the head before: the next one has its own
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._check_head)

    def _check_head(self) -> None:
        self._deadline = None
        if not self._is_answering and not self.transport.is_closing():
            self._refuse(408, f"no complete request within {REQUEST_S:g} s")

    def _refuse(self, code: int, message: str) -> None:
        body = json.dumps(error_body(message, code))
        head = f"HTTP/1.1 {code} Refused\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        self.transport.write_eof()
        self._is_refused = True
        # closing it at once would drop the answer while the client still sends
        self._deadline = self.loop.call_later(_LINGER_S, self.transport.close)


class Guard:
    """An application that refuses requests for other hosts, slow bodies and slow readers."""

    def __init__(self, app: App, host: str) -> None:
        """`host` is the address that the server is bound to."""
        self._app = app
        self._hosts = {"localhost", "127.0.0.1", "::1", host}
        self._is_open = host in ("", "0.0.0.0", "::")
        if self._is_open:
            self._hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_whole, end_s = False, asyncio.get_running_loop().time() + REQUEST_S

        async def receive_in_time() -> Message:
            nonlocal is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else end_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"no complete body within {REQUEST_S:g} s", {"Connection": "close"}
                ) from None
            is_whole = is_whole or not message.get("more_body", False)
            return message

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if not self._allows(host):
            await _refuse(send, f"Host {host!r:.80} is not served: use localhost or the address")
            return
        await self._app(scope, receive_in_time, send_in_time)

    def _allows(self, given: str) -> bool:
        host = given.lower()
        if host.startswith("["):
            host = host[1:].partition("]")[0]
        elif host.count(":") == 1:
            host = host.partition(":")[0]
        return host in self._hosts or (self._is_open and _is_address(host))


def _is_address(host: str) -> bool:
    """Return whether a host is a number, which no foreign name can stand for."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _refuse(send: Send, message: str) -> None:
    body = json.dumps(error_body(message, 403)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
