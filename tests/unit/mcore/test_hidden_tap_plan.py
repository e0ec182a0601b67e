"""Which sequences a tap takes and which peer gets each: arithmetic alone."""

from __future__ import annotations

import random

import pytest

from tlt_megatron.mcore.hidden_tap import HiddenStateTap, TapPlace, plan_tap
from tlt_megatron.runtime.process_groups import SINGLE, Group, ProcessGroups


def plan(
    lengths: list[list[int]], max_tokens: int, num_parts: int = 1, pp_size: int = 1
) -> list[TapPlace]:
    tp, pp = (
        Group(handle=None, rank=0, global_ranks=tuple(range(n))) for n in (num_parts, pp_size)
    )
    return plan_tap(lengths, ProcessGroups(world=SINGLE, tp=tp, pp=pp), max_tokens)


def lengths_of(places: list[TapPlace]) -> list[int]:
    return [place.end - place.start for place in places]


def test_places_are_where_the_sequences_stand() -> None:
    places = plan([[5, 2, 9], [], [4]], 100)
    # Two tokens teach nothing.
    assert [(p.micro_batch, p.start, p.end) for p in places] == [(0, 7, 16), (0, 0, 5), (2, 0, 4)]
    assert plan([], 100, num_parts=2, pp_size=2) == []


def test_budget_goes_to_the_longest_first() -> None:
    lengths = [[30, 8], [20, 50, 11]]
    places = plan(lengths, 49 + 19 + 7)
    assert lengths_of(places) == [50, 20, 8]  # 30 no more, and nor 11 after 20
    assert plan(lengths, 3) == []


@pytest.mark.parametrize(
    ("max_tokens", "chosen"),
    [(1000, [3, 0, 2]), (29, [0]), (80, [3, 0]), (1, [])],
    ids=("half_of_all", "longest_does_not_fit", "two_fit", "none_fits"),
)
def test_the_long_tail_is_the_longest_up_to_half_of_all_tokens(
    max_tokens: int, chosen: list[int]
) -> None:
    tap = HiddenStateTap(on_sequence=id, max_bytes=4 * 8 * max_tokens, hidden_size=8)
    lengths = [30, 20, 30, 50, 20, 20, 20, 10]  # 80 after two are less than half of 200
    assert tap.choose(lengths, ProcessGroups(world=SINGLE)) == chosen
    tap = HiddenStateTap(on_sequence=id, max_bytes=1 << 20, hidden_size=8, has_own_passes=False)
    assert tap.choose(lengths, ProcessGroups(world=SINGLE)) == []


@pytest.mark.parametrize(("num_parts", "pp_size"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_peers_get_equal_parts_and_no_column_of_stages_holds_too_much(
    num_parts: int, pp_size: int
) -> None:
    chance = random.Random(2)
    lengths = [[chance.randint(3, 60) for _ in range(9)] for _ in range(5)]
    budget = 400
    places = plan(lengths, budget, num_parts, pp_size)
    loads = {(t, p): 0 for t in range(num_parts) for p in range(pp_size)}
    for place in places:
        loads[place.part, place.pp_rank] += place.num_states
    assert max(loads.values()) - min(loads.values()) <= 60
    for t in range(num_parts):
        column = sum(loads[t, p] for p in range(pp_size))
        assert budget - 60 < column <= budget
    assert len({(p.micro_batch, p.start) for p in places}) == len(places) < 45
