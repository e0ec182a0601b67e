"""Collectives and groups on real gloo ranks: what each member gets, also in groups that are not the
world.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
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


def test_gather_gives_every_member_of_a_group_all_values_in_group_order() -> None:
    def body() -> list[object]:
        rank = dist.get_rank()
        return gather_objects(
            {"rank": rank, "text": "x" * (1 + rank * 1000)}, own_group((0, 2), (1, 3))
        )

    values = [{"rank": rank, "text": "x" * (1 + rank * 1000)} for rank in range(4)]
    even, odd = values[::2], values[1::2]
    assert run_ranks(4, body) == [even, odd, even, odd]


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_source_is_a_rank_within_the_group(source: int) -> None:
    def body() -> str:
        return broadcast_object(f"from {dist.get_rank()}", own_group((0, 1), (2, 3)), source)

    first, second = f"from {source}", f"from {2 + source}"
    assert run_ranks(4, body) == [first, first, second, second]


@pytest.mark.parametrize("yes", [(), (0,), (3,), (0, 1, 2, 3)])
def test_agree_any_is_the_same_answer_on_all_members(yes: tuple[int, ...]) -> None:
    def body() -> tuple[bool, bool]:
        is_yes = dist.get_rank() in yes
        return agree_any(is_yes, world_group()), agree_any(is_yes, own_group((0, 1), (2, 3)))

    pairs = [bool({0, 1} & set(yes)), bool({2, 3} & set(yes))]
    assert run_ranks(4, body) == [(bool(yes), pairs[rank // 2]) for rank in range(4)]


def test_sum_metrics_adds_key_by_key_over_the_members_of_a_group() -> None:
    """Whatever the order of the keys; a key that a rank lacks counts as zero, and a NaN reaches
    all.
    """

    def body() -> list[dict[str, float]]:
        rank, world = dist.get_rank(), world_group()
        metrics = {"a": 2.0**24 if rank == 0 else 1.0, "b": 10.0**rank, f"own {rank}": 1.0}
        if rank == 1:
            metrics = dict(reversed(metrics.items()))
        pair = own_group((0, 1), (2, 3))
        is_nan = math.isnan(sum_metrics({"a": math.nan if rank == 1 else 1.0}, world)["a"])
        return [sum_metrics(metrics, world), sum_metrics(metrics, pair), {"is_nan": is_nan}]

    # In float32 2**24 + 1 + 1 + 1 would still be 2**24.
    total = {"a": 2.0**24 + 3, "b": 1111.0} | {f"own {rank}": 1.0 for rank in range(4)}
    first = {"a": 2.0**24 + 1, "b": 11.0, "own 0": 1.0, "own 1": 1.0}
    second = {"a": 2.0, "b": 1100.0, "own 2": 1.0, "own 3": 1.0}
    assert run_ranks(4, body) == [
        [total, pair, {"is_nan": True}] for pair in (first, first, second, second)
    ]
    assert run_ranks(2, lambda: sum_metrics({}, world_group())) == [{}, {}]


def test_a_group_of_one_talks_to_nobody() -> None:
    value = object()
    assert gather_objects(value, SINGLE) == [value]
    assert broadcast_object(value, SINGLE) is value
    assert agree_any(True, SINGLE)
    assert not agree_any(False, SINGLE)
    assert sum_metrics({"a": 0.1}, SINGLE) == {"a": 0.1}
    barrier(SINGLE)


def test_group_knows_its_members_and_this_ranks_place() -> None:
    def body() -> tuple[dict[str, object], bool, bool, bool]:
        group = own_group((0,), (1, 3), (2,))
        values = {name: getattr(group, name) for name in ("rank", "size", "global_ranks")}
        return values, group.is_first, group.is_last, group.handle is not None

    pair = {"size": 2, "global_ranks": (1, 3)}
    assert run_ranks(4, body) == [
        ({"rank": 0, "size": 1, "global_ranks": (0,)}, True, True, False),
        ({"rank": 0, **pair}, True, False, True),
        ({"rank": 0, "size": 1, "global_ranks": (2,)}, True, True, False),
        ({"rank": 1, **pair}, False, True, True),
    ]


def test_nobody_passes_a_barrier_before_the_last_has_come(tmp_path: Path) -> None:
    def body() -> int:
        (tmp_path / str(dist.get_rank())).touch()
        barrier(world_group())
        return len(list(tmp_path.iterdir()))

    assert run_ranks(4, body) == [4] * 4


def test_maxima_keep_the_order_of_the_names() -> None:
    def on_rank() -> list[tuple[str, float]]:
        rank = dist.get_rank()
        values = {"gen": 1.0 + rank, "reward": 2.0 - rank, "old_log_prob": 3.0}
        return list(max_by_name(values, group_of(dist.group.WORLD)).items())

    expected = [("gen", 2.0), ("reward", 2.0), ("old_log_prob", 3.0)]
    assert run_ranks(2, on_rank) == [expected, expected]
