"""The store of one job: a TCPStore that rank 0 hosts on the job's own interface.

A job on one machine listens on the loopback, a larger one on the address by which the other hosts
reach MASTER_ADDR. All keys start with a random token of the job, so two jobs never mix up their
keys. This is no authentication: any process that can connect to the port can list and change the
keys. Put the ports of a job on several hosts behind a firewall.
"""

from __future__ import annotations

import datetime
import os
import resource
import secrets
import socket
from collections.abc import Sequence

import torch.distributed as dist

from tlt_megatron.runtime.collectives import broadcast_object, gather_objects
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.rank_process import machine_id

_TOKEN_BYTES = 16
_BACKLOG = 2048  # connections that may wait to be accepted: all ranks connect at once
_LOOPBACK = "127.0.0.1"


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
        if not isinstance(self._store, dist.PrefixStore):  # of a single rank
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
    addresses = gather_objects((machine_id(), _master_addresses()), world)
    listening = _listen(addresses) if world.is_first else None
    token, host, port = broadcast_object(
        (
            secrets.token_hex(_TOKEN_BYTES),
            listening.getsockname()[0] if listening else "",
            listening.getsockname()[1] if listening else 0,
        ),
        world,
    )
    store = dist.TCPStore(
        host,
        port,
        is_master=listening is not None,
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening else None,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return JobStore(dist.PrefixStore(token, store))


def _listen(addresses: Sequence[tuple[str, list[str]]]) -> socket.socket:
    """Return a listening socket of rank 0: on the loopback, or on an address that other machines
    resolve MASTER_ADDR to.

    `addresses` holds the machine of each rank, and what MASTER_ADDR is there.
    """
    # In large jobs, two connections per rank exceed the usual limit of 1,024 open files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    own = machine_id()
    return bind_first(
        [a for machine, known in addresses if machine != own for a in known] or [_LOOPBACK]
    )


def bind_first(addresses: Sequence[str]) -> socket.socket:
    """Listen on a free port of the first of `addresses` that this machine has.

    RuntimeError if it has none of them.
    """
    for address in dict.fromkeys(addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.bind((address, 0))
        except OSError:  # not an address of this machine
            listening.close()
            continue
        listening.listen(_BACKLOG)
        return listening
    raise RuntimeError(
        f"MASTER_ADDR={os.environ['MASTER_ADDR']} is {sorted(set(addresses))} for the other hosts:"
        " must be an address of the host of rank 0"
    )


def _master_addresses() -> list[str]:
    """Return the addresses that MASTER_ADDR resolves to on this host."""
    found = socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
