"""Where the ranks of a job meet: torchrun's static rendezvous, but its stores listen on one address
of node 0.

torchrun's own rendezvous listen on every interface. That of `--standalone`, `c10d`, also unpickles
what it reads from its store, so any process that reaches the port can run code. This one reads text
and numbers alone. launch/torchrun.py selects it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_min_max_nnodes

from tlt_megatron.runtime.job_store import LOOPBACK, open_store

_NAME = "one address"  # names this rendezvous among torchrun's
_STATIC_PORT = 29500  # torchrun's default for several nodes
_LEAVE_S = 60.0  # for which node 0 waits at the end of a job for a node that may be lost


class Place(NamedTuple):
    """Where the launchers of a job meet, and which of them this one is."""

    host: str
    port: int
    node: int
    num_nodes: int


def meeting_place(options: argparse.Namespace) -> Place | None:
    """Return where launchers with these options of torchrun meet: those of a job on one machine,
    or with the rendezvous `static` on several.

    None if the user selects another rendezvous of torchrun for several machines.
    """
    _, num_nodes = parse_min_max_nnodes(options.nnodes)
    if num_nodes == 1:
        port = 0 if options.standalone else options.master_port or 0
        return Place(options.local_addr or LOOPBACK, port, 0, 1)
    if options.rdzv_backend != "static":
        return None
    endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port or ''}"
    host, port = parse_rendezvous_endpoint(endpoint, _STATIC_PORT)
    return Place(host, port, options.node_rank, num_nodes)


def with_rendezvous(
    options: argparse.Namespace,
) -> tuple[argparse.Namespace, Callable[[], None]]:
    """Return torchrun's options with this rendezvous, where there is a meeting place, and what to
    call when torchrun has succeeded (see `JobRendezvous.leave`).

    A rendezvous that the user selects for several machines stays torchrun's.
    """
    made: list[JobRendezvous] = []
    place = meeting_place(options)
    if place is None:
        return options, lambda: None

    def create(parameters: RendezvousParameters) -> JobRendezvous:
        made.append(JobRendezvous(*place, parameters.run_id, int(parameters.config["timeout"])))
        return made[-1]

    def leave() -> None:
        for rendezvous in made:
            rendezvous.leave()

    rendezvous_handler_registry.register(_NAME, create)
    chosen = {"rdzv_backend": _NAME, "rdzv_endpoint": f"{place.host}:{place.port}"}
    # torchrun warns of other values, which this rendezvous has taken already.
    changed = chosen | {"standalone": False, "node_rank": 0}
    return argparse.Namespace(**vars(options) | changed), leave


class JobRendezvous(StaticTCPRendezvous):
    """The store of the launchers, and one for each start of the ranks: old keys would mislead
    restarted ranks.
    """

    _num_starts = 0
    _ranks_store: dist.TCPStore | None = None  # on node 0

    def get_backend(self) -> str:
        return _NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node's place, and the address of the store of its ranks.

        OSError if node 0 cannot listen there.
        """
        is_alone = self.world_size == 1
        if self._store is None:
            self._store = dist.HashStore() if is_alone else self._open(self.master_port)
        self._num_starts += 1
        store = dist.PrefixStore(f"start {self._num_starts}", self._store)
        if self.rank == 0:
            self._ranks_store = None  # closes that of the start before
            self._ranks_store = self._open(self.master_port if is_alone else 0)
            store.set("port", str(self._ranks_store.port))
        port = store.get("port")
        if not (port.isdigit() and len(port) < 6):
            raise OSError(
                f"{self.master_addr} answers as another program: no port in {port[:20]!r}"
            )
        place = RendezvousStoreInfo(self.master_addr, int(port))
        return RendezvousInfo(store, self.rank, self.world_size, place)

    def leave(self) -> None:
        """Leave the job after torchrun's last barrier. Node 0 goes last: without its store, a node
        that is still at the barrier would print a traceback.
        """
        with suppress(dist.DistError):  # a node is lost when nothing is left to do
            if self._store is not None and self.rank:
                self._store.set(f"left/{self.rank}", "")
            elif self._store is not None:
                others = [f"left/{node}" for node in range(1, self.world_size)]
                self._store.wait(others, timedelta(seconds=_LEAVE_S))

    def _open(self, port: int) -> dist.TCPStore:
        """Open a store on node 0; connect to it on the others."""
        return open_store(self.master_addr, port, self.timeout, is_host=self.rank == 0)
