"""Where ranks meet: on one address, in a new store at each start."""

from __future__ import annotations

import os
import socket

import psutil
import pytest
import torch.distributed as dist

from tests.ranks import free_port, run_ranks
from tlt_megatron.runtime.rendezvous import JobRendezvous


def test_nodes_meet_on_one_address_and_restarted_ranks_find_an_empty_store() -> None:
    port = free_port()

    def node() -> set[str]:
        rank = int(os.environ["RANK"])
        rendezvous = JobRendezvous("127.0.0.1", port, rank, 2, "run", 30)
        for _ in range(2):
            info = rendezvous.next_rendezvous()
            assert (info.rank, info.world_size) == (rank, 2)
            place = info.bootstrap_store_info
            assert place is not None
            store = dist.TCPStore(place.master_addr, place.master_port)
            assert not store.check([f"old {rank}"])
            store.set(f"old {rank}", "")
            info.store.set(f"seen by {rank}", "")
            info.store.wait([f"seen by {1 - rank}"])
        sockets = psutil.Process().net_connections("tcp")
        return {c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN}

    assert run_ranks(2, node, has_world=False) == [{"127.0.0.1"}, set()]


def test_a_used_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = JobRendezvous("127.0.0.1", port, 0, 1, "run", 30)
        with pytest.raises(OSError, match=rf"port {port} of 127.0.0.1: Address already in use$"):
            node.next_rendezvous()
