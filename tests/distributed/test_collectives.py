"""Collectives and groups on real gloo ranks: what each member gets, also in groups that are not the
world.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch.distributed as dist

from tests.ranks import run_ranks
from tlt_megatron.runtime.collectives import (
    agree_any,
    barrier,
    broadcast_object,
    gather_objects,
    max_by_name,
    sum_metrics,
)
from tlt_megatron.runtime.process_groups import SINGLE, Group, group_of


def world_group() -> Group:
    return group_of(dist.group.WORLD)


def own_group(*members: tuple[int, ...]) -> Group:
    """The one of several groups that this rank is in; every rank makes all of them, in order."""
    handles = [dist.new_group(list(ranks)) for ranks in members]
    (index,) = (i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    return group_of(handles[index])


def test_every_member_of_a_group_gets_what_its_members_have(tmp_path: Path) -> None:
    """In group order, from a source that is counted within the group, and behind a barrier."""

    def body() -> list[object]:
        rank, pair, world = dist.get_rank(), own_group((0, 2), (1, 3)), world_group()
        values = {"slow": 1.0 + rank, "fast": 2.0 - rank, "same": 3.0}
        (tmp_path / str(rank)).touch()
        barrier(world)
        return [
            gather_objects({"rank": rank, "text": "x" * (1 + rank * 1000)}, pair),
            [broadcast_object(rank, pair, source) for source in (0, 1)],
            [agree_any(rank in yes, pair) for yes in ((), (0,), (3,), (0, 1, 2, 3))],
            list(max_by_name(values, pair).items()),
            len(list(tmp_path.iterdir())),
        ]

    found = run_ranks(4, body)
    for rank, (gathered, sent, agreed, largest, num_files) in enumerate(found):
        first, second = (0, 2) if rank % 2 == 0 else (1, 3)
        assert gathered == [{"rank": r, "text": "x" * (1 + r * 1000)} for r in (first, second)]
        assert sent == [first, second]
        assert agreed == [False, first == 0, second == 3, True]
        assert largest == [("slow", 1.0 + second), ("fast", 2.0 - first), ("same", 3.0)]
        assert num_files == 4


def test_sum_metrics_adds_key_by_key_over_the_members_of_a_group() -> None:
    """Whatever the order of the keys; a key that a rank lacks counts as zero, and a NaN reaches
    all.
    """

    def body() -> list[dict[str, float]]:
        rank, world = dist.get_rank(), world_group()
        metrics = {"a": 2.0**24 if rank == 0 else 1.0, "b": 10.0**rank, f"own {rank}": 1.0}
        if rank == 1:
            metrics = dict(reversed(metrics.items()))
        is_nan = math.isnan(sum_metrics({"a": math.nan if rank == 1 else 1.0}, world)["a"])
        return [sum_metrics(metrics, world), {"is_nan": is_nan}, sum_metrics({}, world)]

    # In float32 2**24 + 1 + 1 + 1 would still be 2**24.
    total = {"a": 2.0**24 + 3, "b": 1111.0} | {f"own {rank}": 1.0 for rank in range(4)}
    assert run_ranks(4, body) == [[total, {"is_nan": True}, {}]] * 4


def test_a_group_of_one_talks_to_nobody() -> None:
    value = object()
    assert gather_objects(value, SINGLE) == [value]
    assert broadcast_object(value, SINGLE) is value
    assert [agree_any(flag, SINGLE) for flag in (True, False)] == [True, False]
    assert sum_metrics({"a": 0.1}, SINGLE) == {"a": 0.1}
    barrier(SINGLE)


def test_group_knows_its_members_and_this_ranks_place() -> None:
    def body() -> tuple[object, ...]:
        group = own_group((0,), (1, 3), (2,))
        is_ours = group.handle is not None
        return group.rank, group.global_ranks, group.is_first, group.is_last, is_ours

    assert run_ranks(4, body) == [
        (0, (0,), True, True, False),
        (0, (1, 3), True, False, True),
        (0, (2,), True, True, False),
        (1, (1, 3), False, True, True),
    ]
