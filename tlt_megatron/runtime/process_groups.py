"""Ranks and their groups as values. Groups are made once at start (mcore/initialize.py) and passed in."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One communicator. `handle` is None where the group has a single member: nothing to communicate."""

    handle: dist.ProcessGroup | None
    rank: int  # of this process within the group
    size: int
    global_ranks: tuple[int, ...]  # of the members, in group order

    @property
    def is_first(self) -> bool:
        """Whether this process is the group's first member."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process is the group's last member."""
        return self.rank == self.size - 1


SINGLE = Group(handle=None, rank=0, size=1, global_ranks=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """The axes of the training layout. Rank order is Megatron's: tp fastest, then dp, then pp."""

    world: Group
    tp: Group = SINGLE
    pp: Group = SINGLE
    dp: Group = SINGLE


def group_of(handle: dist.ProcessGroup) -> Group:
    """The value for an existing torch group that this process is a member of."""
    ranks = tuple(dist.get_process_group_ranks(handle))
    return Group(
        handle=handle if len(ranks) > 1 else None,
        rank=ranks.index(dist.get_rank()),
        size=len(ranks),
        global_ranks=ranks,
    )


def init_world(backend: str, timeout_s: float) -> Group:
    """Join the world that torchrun describes in the environment; a plain process is a world of one."""
    for name, default in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, default)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    return Group(
        handle=dist.group.WORLD,
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        global_ranks=tuple(range(dist.get_world_size())),
    )
