"""What the buffer of drafter data keeps over the steps, and what it evicts first."""

from __future__ import annotations

from collections import Counter

from tests.draft_data import (
    ALL,
    bytes_of,
    fill,
    make_buffer,
    make_sequence,
    names_in,
    names_kept,
    num_tail,
)


def test_at_a_new_step_the_last_ones_data_is_there_and_older_is_gone() -> None:
    buffer = make_buffer(**ALL)
    fill(buffer, 0, {100: 9, 101: 5})
    buffer.start_step(1)
    fill(buffer, 1, {200: 8})
    assert names_kept(buffer) == {100, 101, 200}
    buffer.start_step(2)
    assert names_kept(buffer) == {200}
    assert names_in(buffer.next_batch(50)) == [200]
    buffer.start_step(4)
    assert buffer.next_batch(50) is None
    assert buffer.num_bytes == 0


def test_as_many_earlier_steps_stay_as_asked_for() -> None:
    buffer = make_buffer(keep_steps=3, **ALL)
    for step in range(5):
        buffer.start_step(step)
        fill(buffer, step, {100 + step: 20, 200 + step: 5})
    assert names_kept(buffer) == {101, 102, 103, 104, 201, 202, 203, 204}
    assert num_tail(buffer) == 3  # the longest of each earlier step
    assert buffer.add(make_sequence(300, 9), 1)
    assert not buffer.add(make_sequence(301, 9), 0)


def test_of_several_earlier_steps_the_oldest_goes_first() -> None:
    buffer = make_buffer(keep_steps=2, data_bytes=bytes_of(100), long_tail_share=0.6, **ALL)
    for step, lengths in enumerate(({100: 18, 101: 24}, {110: 10, 111: 30}, {})):
        buffer.start_step(step)
        fill(buffer, step, lengths)
    order, kept = [], names_kept(buffer)
    for name in range(200, 203):
        buffer.add(make_sequence(name, name - 178), 2)
        now = names_kept(buffer)
        order += sorted((kept | {name}) - now)
        kept = now
    # Both tails are within their share of 60.
    assert order == [100, 110, 200]


def test_the_newest_long_tail_has_its_turns_where_the_tails_share_is_small() -> None:
    buffer = make_buffer(keep_steps=6, long_tail_share=0.2, **ALL)
    for step in range(6):
        buffer.start_step(step)
        fill(buffer, step, {100 + step: 30} | {200 + 10 * step + n: 5 for n in range(4)})
        counts = Counter(name for _ in range(40) for name in names_in(buffer.next_batch(40)))
        turns = [counts[100 + earlier] for earlier in range(step)]
        assert not turns or max(turns) - min(turns) <= 2  # the 40 begin and end within an epoch
        assert all(turns)


def test_drafters_are_judged_on_the_newest_step_first() -> None:
    buffer = make_buffer(keep_steps=3, holdout_share=0.999)
    for step in range(3):
        buffer.start_step(step)
        fill(buffer, step, dict.fromkeys(range(10 * step, 10 * step + 9), 12))
    first, *_, last = buffer.holdout_batches(40)
    assert min(names_in(first)) >= 20
    assert max(names_in(last)) < 10


def test_a_drafter_of_earlier_steps_may_be_judged_on_all_that_is_new() -> None:
    buffer = make_buffer(keep_steps=3, **ALL)
    fill(buffer, 0, dict.fromkeys(range(10, 14), 12))
    buffer.start_step(1)
    fill(buffer, 1, dict.fromkeys(range(20, 24), 12))
    assert buffer.holdout_batches(100) == []
    (batch,) = buffer.holdout_batches(100, has_new=True)
    assert sorted(names_in(batch)) == [20, 21, 22, 23]


def test_what_becomes_tail_joins_the_running_epoch_of_the_tail() -> None:
    buffer = make_buffer(keep_steps=9, **ALL)
    fill(buffer, 0, {100: 30, 200: 5})
    buffer.start_step(1)
    fill(buffer, 1, {101: 30, 201: 5})
    for _ in range(40):  # the one long sequence of the tail has far more turns than all others
        buffer.next_batch(60)
    buffer.start_step(2)
    counts = Counter(name for _ in range(20) for name in names_in(buffer.next_batch(40)))
    assert abs(counts[100] - counts[101]) <= 1


def test_eviction_takes_the_old_before_the_new_and_the_short_before_the_long() -> None:
    """The last step's tail is 103 (52 of its 90 rows); half of the budget is its own."""
    buffer = make_buffer(data_bytes=bytes_of(120), long_tail_share=0.5, **ALL)
    fill(buffer, 0, {101: 12, 102: 30, 103: 54})
    buffer.start_step(1)
    assert num_tail(buffer) == 1
    order = []
    kept = names_kept(buffer)
    for name, num_tokens in ((200, 25), (201, 26), (202, 28), (203, 27), (204, 20), (205, 29)):
        buffer.add(make_sequence(name, num_tokens), 1)
        now = names_kept(buffer)
        order += sorted((kept | {name}) - now)
        kept = now
    # 204 is shorter than anyone of its step, and so evicted as it comes.
    assert order == [101, 102, 200, 201, 204, 203]
    assert kept == {103, 202, 205}


def test_a_tail_beyond_its_share_of_the_budget_makes_room() -> None:
    buffer = make_buffer(data_bytes=bytes_of(100), long_tail_share=0.3, **ALL)
    fill(buffer, 0, {100: 45, 101: 46})
    buffer.start_step(1)
    buffer.add(make_sequence(200, 20), 1)
    assert names_kept(buffer) == {101, 200}
    buffer.add(make_sequence(201, 50), 1)  # 46 of 100 is still more than the share
    assert names_kept(buffer) == {200, 201}
