"""Connections by which rank 0 sees within one heartbeat that a process on another machine has ended. Used by heartbeat.py.

The kernel of a machine closes the connections of a process that ends, however it ends. A frozen process keeps them, and so does
a broken network. Nothing is sent over a lifeline after its first message.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence

from tlt_megatron.runtime.collectives import broadcast_object
from tlt_megatron.runtime.job_store import bind_first
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.rank_process import RankProcess

_TOKEN_BYTES = 16
_CONNECT_S = 60.0
_MESSAGE_S = 5.0  # from a connection to its first message


class Lifelines:
    """On rank 0: a connection to each rank of another machine. On such a rank: its connection, held open."""

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._connections = connections
        for connection in connections.values():
            connection.setblocking(False)

    def take_closed(self) -> list[int]:
        """Return the ranks whose connection was closed since the last call. A network failure does not count."""
        closed = []
        for rank, connection in list(self._connections.items()):
            try:
                is_closed = not connection.recv(1)
            except BlockingIOError:
                continue
            except OSError:  # the network has reset it: only heartbeats are left
                is_closed = False
            self._connections.pop(rank).close()
            if is_closed:
                closed.append(rank)
        return closed

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def connect_lifelines(host: str, ranks: Sequence[RankProcess], world: Group) -> Lifelines:
    """Connect the `ranks` of other machines to rank 0, which listens on its address `host`. A collective of the world."""
    far = {process.rank for process in ranks if process.machine != ranks[0].machine}
    if not far:
        return Lifelines({})
    if world.is_first:
        token = secrets.token_bytes(_TOKEN_BYTES)
        with bind_first([host]) as listening:
            broadcast_object((listening.getsockname()[1], token), world)
            return Lifelines(_accept(listening, token, far))
    port, token = broadcast_object((0, b""), world)
    if world.rank not in far:
        return Lifelines({})
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    connection.sendall(token + world.rank.to_bytes(4))
    return Lifelines({0: connection})


def _accept(listening: socket.socket, token: bytes, far: set[int]) -> dict[int, socket.socket]:
    """Return a connection from each rank in `far`. Drops connections that do not send the token."""
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _CONNECT_S
    while missing := sorted(far - connections.keys()):
        listening.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            raise RuntimeError(
                f"ranks {missing} have not connected to rank 0 within {_CONNECT_S:g} s"
            ) from None
        connection.settimeout(_MESSAGE_S)
        try:
            message = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
        except OSError:
            message = b""
        if message[:_TOKEN_BYTES] == token:
            connections[int.from_bytes(message[_TOKEN_BYTES:])] = connection
        else:
            connection.close()
    return connections
