"""Ranks and their groups as values. Groups are formed once at start (mcore/initialize.py) and
passed in.

Private groups are the exception. Only the members call `form_private_group`, and it leaves torch's
world registry unchanged, so it works while every other rank is busy (spot/session.py).
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlt_megatron.runtime.collective_errors import first_line, is_collective_error
from tlt_megatron.runtime.environment_variables import environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One communicator. `handle` is None if the group has a single member."""

    handle: dist.ProcessGroup | PrivateHandle | None
    rank: int  # this process, counted within the group
    global_ranks: tuple[int, ...]  # the members, in group order

    @property
    def size(self) -> int:
        return len(self.global_ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def of_torch(self) -> dist.ProcessGroup | None:
        """Return the handle for the collectives of torch.distributed.

        TypeError for a private group, which has its own.
        """
        if isinstance(self.handle, PrivateHandle):
            raise TypeError(f"private group {self.handle.name}: torch.distributed does not know it")
        return self.handle

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the members, in place. MemberLost in a private group that is broken."""
        self._run("allreduce", [tensor])

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with that of member `source` (a rank within the group).

        See `all_reduce`.
        """
        self._run("broadcast", tensor, source)

    def _run(self, collective: str, *arguments: object) -> None:
        # torch.distributed's own functions require a group that is registered in the world.
        if isinstance(self.handle, PrivateHandle):
            self.handle.run(collective, *arguments)
        elif self.size > 1:
            getattr(self.handle, collective)(*arguments).wait()


SINGLE = Group(handle=None, rank=0, global_ranks=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """The axes of the training layout. Rank order is Megatron's: tp fastest, then cp, dp, pp."""

    world: Group
    tp: Group = SINGLE
    cp: Group = SINGLE
    pp: Group = SINGLE
    dp: Group = SINGLE
    ep: Group = SINGLE  # part of tensor x context x data: its ranks share the experts of each layer

    @property
    def num_parts(self) -> int:
        """Return the number of ranks that share the tokens of a micro-batch."""
        return self.cp.size * self.tp.size

    @property
    def part(self) -> int:
        """Return which of these parts this rank has."""
        return self.cp.rank * self.tp.size + self.tp.rank


def group_of(handle: object) -> Group:
    """Return the Group of an existing torch group that this process is a member of."""
    assert isinstance(handle, dist.ProcessGroup)  # Megatron's and torch's annotations allow more
    ranks = tuple(dist.get_process_group_ranks(handle))
    own_handle = handle if len(ranks) > 1 else None
    return Group(handle=own_handle, rank=ranks.index(dist.get_rank()), global_ranks=ranks)


def init_world(backend: str, timeout_s: float) -> Group:
    """Join the world that torchrun describes in the environment. Without torchrun, the process is a
    world of one.

    The ranks of one machine listen on its loopback alone, unless the user names another interface.
    """
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault(name, default)
    size = int(os.environ["WORLD_SIZE"])
    if size == int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout, **(alone if size == 1 else {}))
    return group_of(dist.group.WORLD)


class MemberLost(RuntimeError):
    """A member of a private group is gone or silent.

    The group is unusable; its other members can continue without it.
    """


class PrivateHandle:
    """A private group's communicator. MemberLost if a member is gone, or silent for longer than the
    timeout.

    After `close` no reference to the communicator is left, which releases a peer that waits in it.
    """

    def __init__(self, backend: dist.ProcessGroup, name: str) -> None:
        self.name = name
        self._backend: dist.ProcessGroup | None = backend

    def run(self, collective: str, *arguments: object) -> None:
        """Call a method of the communicator and wait for its end."""
        with _telling_loss(self.name):
            if self._backend is None:
                raise MemberLost(f"private group {self.name} is closed")
            # No variable holds the work: an error's traceback would keep the communicator alive.
            getattr(self._backend, collective)(*arguments).wait()

    def close(self) -> None:
        """Drop the communicator. NCCL aborts pending operations; gloo has none after an error."""
        backend, self._backend = self._backend, None
        if backend is not None and not isinstance(backend, dist.ProcessGroupGloo):
            backend.abort()


@contextmanager
def _telling_loss(name: str) -> Iterator[None]:
    """Turn errors of gloo, NCCL and the store into MemberLost.

    Other errors, such as a lack of memory, are not changed.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, MemberLost) or not is_collective_error(error):
            raise
        raise MemberLost(f"private group {name}: {first_line(error)}") from None


def form_private_group(
    store: dist.Store,
    name: str,
    members: Sequence[int],
    rank: int,
    device: torch.device,
    timeout_s: float,
) -> Group:
    """Form a communicator of the global ranks `members`, which include `rank`. All members must
    call it, and no other rank.

    `name` must not have been used before in this store: stale addresses would be taken for answers.
    MemberLost if a member does not join. Example: `form_private_group(store, "7.2", (0, 3), 3,
    device, 20.0)`.
    """
    members = tuple(sorted(members))
    place = members.index(rank)
    if len(members) == 1:
        return Group(handle=None, rank=0, global_ranks=members)
    own_store = dist.PrefixStore(f"group/{name}", store)
    timeout = datetime.timedelta(seconds=timeout_s)
    with _telling_loss(name):
        if device.type == "cuda":
            backend = _form_nccl(own_store, place, len(members), device, timeout)
        else:
            backend = dist.ProcessGroupGloo(own_store, place, len(members), timeout)
    # In torch's stubs, the communicators are no ProcessGroup.
    handle = PrivateHandle(backend, name)  # pyright: ignore[reportArgumentType]
    return Group(handle=handle, rank=place, global_ranks=members)


def _form_nccl(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: datetime.timedelta
) -> dist.ProcessGroupNCCL:
    """Return an NCCL communicator whose waits block the host and raise.

    The constructor reads the variable. Without it, a watchdog thread would end the process instead.
    ncclCommInitRank has no timeout, so the members meet in the store first. Known limit: if one
    dies between that and the end of ncclCommInitRank, heartbeat.py ends the others. NCCL's
    non-blocking mode has a bound, but hangs (meta-pytorch/torchft#320, pytorch/pytorch#153960).
    """
    store.set(f"here/{rank}", "")
    store.wait([f"here/{member}" for member in range(size)], timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with environment({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def forget_private_group(store: dist.Store, group: Group, name: str) -> None:
    """Remove what this member left in the store when it formed `group` under `name`.

    Call it after all members have left.
    """
    # gloo's rendezvous: one address per device and rank. NCCL groups are few and live long.
    store.delete_key(f"group/{name}/0/{group.rank}")
