"""The few collectives outside Megatron. Every member of the given group must call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

from tlt_megatron.runtime.process_groups import Group

T = TypeVar("T")


def gather_objects(value: T, group: Group) -> list[T]:
    """Return the value of every member, in group order, on every member.

    Values are pickled, among our own ranks only.
    """
    if group.size == 1:
        return [value]
    values: list[T] = [None] * group.size  # type: ignore[list-item]
    dist.all_gather_object(values, value, group=group.of_torch)
    return values


def broadcast_object(value: T, group: Group, source: int = 0) -> T:
    """Return the value of member `source` (a rank within the group) on every member."""
    if group.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=group.global_ranks[source], group=group.of_torch)
    return box[0]


def agree_any(flag: bool, group: Group) -> bool:
    """Return whether `flag` is True on any member. The answer is the same on all."""
    return any(gather_objects(flag, group))


def sum_metrics(metrics: dict[str, float], groups: Sequence[Group]) -> dict[str, float]:
    """Sum by key over the members of each group in turn.

    A key that a member lacks counts as zero.
    """
    for group in groups:
        parts = gather_objects(metrics, group)
        names = sorted(set().union(*parts))
        metrics = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    return metrics


def barrier(group: Group) -> None:
    """Wait until every member has called this."""
    if group.size > 1:
        dist.barrier(group=group.of_torch)
