"""The job's store: where it listens, and what a stranger sees. tests/e2e/test_stop.py looks at the
ports of whole jobs.
"""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.spot_phases import world_group
from tlt_megatron.runtime.job_store import listen_at, open_job_store

pytestmark = pytest.mark.waits


def port_of(store: dist.Store) -> int:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port


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


@pytest.mark.parametrize("host, address", [("127.0.0.1", "127.0.0.1"), ("node7", "0.0.0.0")])
def test_a_job_listens_where_others_reach_it(
    host: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Debian, a machine's own name is 127.0.1.1 to itself."""
    found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    if host == "node7":
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found])
    with listen_at(host, 0) as listening:
        assert listening.getsockname()[0] == address
