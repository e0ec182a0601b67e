"""Keeps the ranks whose GPUs one SGLang engine uses in step. The trainer forms their gloo group.

The first rank owns the engine. The others must not use their GPU's memory while the engine
allocates or frees it, and must offer their own copy of the weights. So every exchange with the
engine is a collective of these ranks, and an error on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import Group


@contextmanager
def in_step(what: str, replica: Group) -> Iterator[None]:
    """Enter the block when all ranks have arrived, leave it when all have finished. A collective.

    A rank whose block fails raises its own error; the others a RuntimeError that names it."""
    gather_objects(None, replica)
    error: Exception | None = None
    try:
        yield
    except (RuntimeError, ValueError) as caught:
        error = caught
    reasons = gather_objects(None if error is None else str(error), replica)
    if error is not None:
        raise error
    for rank, reason in zip(replica.global_ranks, reasons, strict=True):
        if reason is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {reason}")
