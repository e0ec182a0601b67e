"""Synchronizes the ranks whose GPUs one SGLang engine uses. Made by the trainer, used by leader and followers.

The first rank is the leader and owns the engine. The others must not use their GPU's memory while the engine allocates or
frees it. Each rank must offer its own copy of the weights. So every exchange with the engine is a collective of these
ranks, and an error on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import SINGLE, Group

T = TypeVar("T")

# Names of the synchronized blocks, for error messages.
LOADING, SLEEPING, WAKING = "loading weights", "putting the engine to sleep", "waking the engine"


class Replica:
    """The ranks of one engine. `group` uses gloo; with one rank nothing is exchanged."""

    def __init__(self, group: Group = SINGLE) -> None:
        self._group = group

    @property
    def is_leader(self) -> bool:
        """Whether this rank owns the engine."""
        return self._group.is_first

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._group.size

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in rank order. A collective."""
        return gather_objects(value, self._group)

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """Enter the block when all ranks have arrived, and leave it when all have finished. A collective. A rank whose block
        fails raises its own error; the other ranks raise a RuntimeError that names `what` and that rank."""
        self.gather(None)
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
