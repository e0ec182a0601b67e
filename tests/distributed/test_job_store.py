"""The job's store: where it listens, what a stranger sees, and that no call waits without end."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.spot_phases import Markers, world_group
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.job_store import bind_first, open_job_store

pytestmark = pytest.mark.waits


def port_of(store: dist.Store) -> int:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port


def test_a_job_on_one_machine_listens_on_the_loopback_alone() -> None:
    def body() -> list[str]:
        store = open_job_store(world_group(), 60.0)
        port = port_of(store.part("x"))
        dist.barrier()
        rows = [
            row.split()
            for name in ("tcp", "tcp6")
            for row in Path("/proc/net", name).read_text().splitlines()[1:]
        ]
        listening = [row[1].split(":") for row in rows if row[3] == "0A"]
        found = [address for address, number in listening if int(number, 16) == port]
        dist.barrier()
        return found

    for addresses in run_ranks(2, body):
        assert addresses == ["0100007F"]  # 127.0.0.1


def test_keys_of_two_jobs_never_meet_and_parts_of_one_do_not_either() -> None:
    def body() -> tuple[bytes, bytes, bool, bool]:
        world = world_group()
        one, other = (open_job_store(world, 60.0) for _ in range(2))
        if world.is_first:
            one.part("a").set("key", "one")
            other.part("a").set("key", "other")
        dist.barrier()
        seen = one.part("a").get("key"), other.connect("a").get("key")
        is_in_b = one.part("b").check(["key"])
        raw = dist.TCPStore("127.0.0.1", port_of(one.part("a")), is_master=False)
        is_plain = raw.check(["a/key"])
        dist.barrier()
        return *seen, is_in_b, is_plain

    assert run_ranks(2, body) == [(b"one", b"other", False, False)] * 2


def test_sockets_of_other_kinds_are_left_alone() -> None:
    """Netlink is what RDMA libraries hold open; its address has no host. Nor have sockets with an abstract name."""

    def body() -> bool:
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
        netlink.bind((0, 0))
        server, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        server.bind(f"\0job-store-{os.getpid()}")
        server.listen()
        client.connect(server.getsockname())
        store = open_job_store(world_group(), 60.0)
        store.connect("a").set(str(dist.get_rank()), "here")
        dist.barrier()
        return all(os.fstat(kind.fileno()) for kind in (netlink, server, client))  # still open

    assert run_ranks(2, body) == [True, True]


def test_every_call_to_a_frozen_host_ends(tmp_path: Path) -> None:
    markers = Markers(tmp_path)

    def body() -> list[str]:
        world = world_group()
        store = open_job_store(world, 4.0)
        pids = gather_objects(os.getpid(), world)
        part, *others = store.part("x"), *(store.connect("x") for _ in range(4))
        part.set(f"key {world.rank}", "1")
        dist.barrier()
        if world.is_first:
            os.kill(os.getpid(), signal.SIGSTOP)
        while Path(f"/proc/{pids[0]}/stat").read_text().split()[2] != "T":
            time.sleep(0.01)
        with ThreadPoolExecutor() as pool:  # each call waits on a connection of its own
            waiting = [
                pool.submit(*call)
                for call in (
                    (part.get, "key 1"),
                    (others[0].check, ["key 1"]),
                    (others[1].wait, ["none"], datetime.timedelta(seconds=4.0)),
                    (others[2].multi_get, ["key 1"]),
                    (others[3].add, "count", 1),
                )
            ]
        errors = [call.exception() for call in waiting]
        assert all(isinstance(error, dist.DistError) for error in errors)
        os.kill(pids[0], signal.SIGKILL)
        markers.set("ended")
        return [str(error).splitlines()[0] for error in errors]

    _, said = run_ranks(2, body, killed=(0,))
    assert said is not None
    assert all("imeout" in text for text in said)


def test_the_first_address_of_this_machine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.1 is reserved for documentation: no machine has it."""
    with bind_first(["192.0.2.1", "127.0.0.1"]) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
        socket.create_connection(listening.getsockname(), timeout=60).close()
    monkeypatch.setenv("MASTER_ADDR", "node7")
    with pytest.raises(
        RuntimeError, match=r"MASTER_ADDR=node7 is \['192\.0\.2\.1'\] for the other"
    ):
        bind_first(["192.0.2.1"])
