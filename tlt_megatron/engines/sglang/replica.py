"""The ranks whose GPUs one SGLang engine uses, and how they keep in step. Made by the trainer, used by leader and followers.

The first rank leads: it owns the engine. The others must not touch their GPU's memory while the engine's processes take it or
give it back, and each rank must offer its own copy of the weights. So every exchange with the engine is a collective of these
ranks, and a failure of one is an error of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.process_groups import SINGLE, Group

T = TypeVar("T")

# What ranks do in step; names of errors.
LOADING, SLEEPING, WAKING = "loading weights", "putting the engine to sleep", "waking the engine"


class Replica:
    """One engine's ranks; `group` talks over gloo. A group of one has nothing to agree on."""

    def __init__(self, group: Group = SINGLE) -> None:
        self._group = group

    @property
    def is_leader(self) -> bool:
        """Whether this rank owns the engine."""
        return self._group.is_first

    @property
    def size(self) -> int:
        """Ranks."""
        return self._group.size

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in order."""
        return gather_objects(value, self._group)

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """No rank enters the block before all are here, and none leaves it before all are done. An error of a block is raised
        where it happened; the other ranks raise a RuntimeError that names `what` and the rank."""
        barrier(self._group)
        error: Exception | None = None
        try:
            yield
        except (RuntimeError, ValueError) as caught:
            error = caught
        reasons = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for place, reason in enumerate(reasons):
            if reason is not None:
                rank = self._group.global_ranks[place]
                raise RuntimeError(f"{what} failed on rank {rank}: {reason}")
