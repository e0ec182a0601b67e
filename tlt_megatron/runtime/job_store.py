"""The store of one job: a TCPStore that rank 0 hosts on the job's own interface.

A job on one machine listens on the loopback, a larger one on MASTER_ADDR. All keys start with a
random token of the job, so two jobs never mix up their keys. This is no authentication: any process
that can connect to the port can list and change the keys. Put the ports of a job on several hosts
behind a firewall.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import secrets
import socket
from datetime import timedelta

import torch.distributed as dist

from tlt_megatron.runtime.collectives import broadcast_object
from tlt_megatron.runtime.process_groups import Group

_TOKEN_BYTES = 16
_BACKLOG = 2048  # connections that may wait to be accepted: all ranks connect at once
LOOPBACK = "127.0.0.1"


class JobStore:
    """A rank's access to the job's store.

    A call fails with a DistError if rank 0 is gone. If rank 0 is frozen, it does not return: the
    heartbeat ends the process.
    """

    def __init__(self, store: dist.Store) -> None:
        """`store` is the connection of this rank's main thread."""
        self._store = store

    def part(self, name: str) -> dist.Store:
        """Return the keys under `name`, over the main thread's connection."""
        return dist.PrefixStore(name, self._store)

    def connect(self, name: str) -> dist.Store:
        """Return the keys under `name`, over a new connection.

        On a shared one, a waiting thread blocks the others.
        """
        if not isinstance(self._store, dist.PrefixStore):  # a single rank has no prefix
            return self.part(name)
        store = self._store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stubs
        return dist.PrefixStore(name, store)


def open_job_store(world: Group, timeout_s: float) -> JobStore:
    """Open the store on rank 0 and connect every rank. A collective of the world.

    A key that does not exist is waited for `timeout_s`. The store lives as long as rank 0 keeps the
    returned value.
    """
    if world.size == 1:
        return JobStore(dist.HashStore())
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    host = LOOPBACK if is_one_machine else os.environ["MASTER_ADDR"]
    timeout, store, port = timedelta(seconds=timeout_s), None, 0
    if world.is_first:
        # In large jobs, two connections per rank exceed the usual limit of 1,024 open files.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        store = open_store(host, 0, timeout, is_host=True)
        port = store.port
    token, port = broadcast_object((secrets.token_hex(_TOKEN_BYTES), port), world)
    if store is None:
        store = open_store(host, port, timeout, is_host=False)
    return JobStore(dist.PrefixStore(token, store))


def open_store(host: str, port: int, timeout: timedelta, *, is_host: bool) -> dist.TCPStore:
    """Host a store at `port` of the address that `host` has here (0: a free port), or connect to
    the store there.
    """
    listening = listen_at(host, port) if is_host else None
    return dist.TCPStore(
        host,
        listening.getsockname()[1] if listening else port,
        is_master=is_host,
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening else None,
        timeout=timeout,
    )


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `port` of the address that `host` has here; 0: a free port.

    If the machine's own name means its loopback, as with Debian's 127.0.1.1, the socket listens on
    all addresses: other machines use another one.
    """
    family, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(address).is_loopback and host not in ("localhost", address):
        address = ""
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(
            f"cannot listen at port {port} of {host}: {os.strerror(error.errno or 0)}"
        ) from None
