"""The buffer of drafter data: bytes, turns, the long tail, and a resume that changes nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections import Counter
from typing import Any

import pytest
import torch

from tlt_megatron.config.schema import SpotSection
from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.packing import DraftBatch
from tlt_megatron.types import DraftSequence

HIDDEN_SIZE = 4


def make_sequence(name: int, num_tokens: int, *, loss_start: int = 2) -> DraftSequence:
    """Tokens [name, 1, 2, ..]; the state at token t is (name, t, 0, 0)."""
    features = torch.zeros(num_tokens, HIDDEN_SIZE)
    features[:, 0], features[:, 1] = name, torch.arange(num_tokens)
    token_ids = torch.arange(num_tokens)
    token_ids[0] = name
    return DraftSequence(token_ids=token_ids, features=features, loss_start=loss_start)


def bytes_of(num_tokens: int) -> int:
    """The bytes that are kept: int64 tokens, and float32 states at all tokens but the last."""
    return 8 * num_tokens + 4 * HIDDEN_SIZE * (num_tokens - 1)


def names_in(batch: DraftBatch | None) -> list[int]:
    """The names of the sequences of a batch, in order."""
    assert batch is not None
    starts = torch.tensor([0, *batch.lengths[:-1]]).cumsum(0)
    return batch.features[starts, 0].int().tolist()


def names_kept(buffer: DataBuffer) -> set[int]:
    return {int(t[0]) for n, t in buffer.state_dict()["tensors"].items() if n.endswith("token_ids")}


def tail_in(buffer: DataBuffer) -> set[int]:
    """The names of the long tail."""
    state = buffer.state_dict()
    keys = [sample["key"] for sample in state["values"]["samples"] if sample["is_tail"]]
    return {int(state["tensors"][f"{key}.token_ids"][0]) for key in keys}


def make_buffer(**settings: Any) -> DataBuffer:
    return DataBuffer(SpotSection(**settings))


def fill(buffer: DataBuffer, step: int, lengths: dict[int, int]) -> None:
    """Sequences of the step that the buffer is in."""
    assert buffer.step == step
    for name, num_tokens in lengths.items():
        buffer.add(make_sequence(name, num_tokens))


def take(buffer: DataBuffer, max_tokens: int) -> tuple[list[int], DraftBatch]:
    """The next batch and the names in it; it counts as trained on."""
    batch = buffer.next_batch(max_tokens)
    assert batch is not None
    buffer.mark_trained()
    return names_in(batch), batch


def test_budget_is_never_exceeded_and_everything_is_accounted_for() -> None:
    chance = random.Random(3)
    budget = bytes_of(300)
    buffer = make_buffer(data_bytes=budget)
    added_bytes = 0
    for name in range(600):
        if chance.random() < 0.03:
            buffer.start_step(buffer.step + chance.choice((1, 1, 2)))
        num_tokens = chance.randint(3, 20) if chance.random() < 0.8 else chance.randint(20, 290)
        buffer.add(make_sequence(name, num_tokens))
        added_bytes += bytes_of(num_tokens)
        tensors = buffer.state_dict()["tensors"].values()
        assert buffer.num_bytes == sum(tensor.nbytes for tensor in tensors) <= budget
        assert all(t.nbytes == t.untyped_storage().nbytes() for t in tensors)
        if name % 5 == 0:
            batch = buffer.next_batch(64)
            assert batch is None or batch.num_rows <= 64
            buffer.mark_trained()
    assert 0 < buffer.num_bytes < added_bytes


def test_states_are_kept_in_the_buffers_dtype_and_detached_from_the_source() -> None:
    buffer = DataBuffer(SpotSection(), torch.bfloat16)
    wide = torch.randn(6, 3 * HIDDEN_SIZE, dtype=torch.float64, requires_grad=True)
    final = torch.randn(6, HIDDEN_SIZE, dtype=torch.float64)
    expected = wide[:4].detach().bfloat16(), final[1:5].bfloat16()
    buffer.add(DraftSequence(token_ids=torch.arange(6), features=wide, final_hidden=final))
    final.zero_()
    batch = buffer.next_batch(9)
    assert torch.equal(batch.features, expected[0])
    assert torch.equal(batch.target_hidden, expected[1])
    assert not batch.features.requires_grad


def test_long_tail_has_half_of_the_rows() -> None:
    """The long tail is of the last step: its longest sequences, which hold half of its rows."""
    chance = random.Random(5)
    buffer = make_buffer()
    lengths = {n: chance.randint(5, 20) for n in range(100, 160)}
    lengths |= {n: chance.randint(60, 130) for n in range(160, 176)}
    fill(buffer, 0, lengths)
    buffer.start_step(1)
    fill(buffer, 1, {n: chance.randint(5, 30) for n in range(200, 260)})
    tail = tail_in(buffer)
    rows = {name: num_tokens - 2 for name, num_tokens in lengths.items()}
    assert min(rows[n] for n in tail) >= max(rows[n] for n in rows.keys() - tail)
    held, total = sum(rows[n] for n in tail), sum(rows.values())
    assert total <= 2 * held < total + 2 * max(rows.values())
    num_tail = num_rows = 0
    for _ in range(150):
        names, batch = take(buffer, 400)
        num_rows += batch.num_rows
        num_tail += sum(r for r, n in zip(batch.lengths, names, strict=True) if n in tail)
    assert num_tail / num_rows == pytest.approx(0.5, abs=0.1)
    assert num_rows > 0.9 * 150 * 400  # batches are nearly full


@pytest.mark.parametrize("has_tail", [False, True])
def test_short_and_long_sequences_come_equally_often(has_tail: bool) -> None:
    chance = random.Random(1)
    buffer = make_buffer()
    fill(buffer, 0, {n: chance.choice((3, 7, 15)) for n in range(100, 140)})
    if has_tail:
        buffer.start_step(1)
        fill(buffer, 1, {n: chance.randint(3, 90) for n in range(200, 230)})
    tail = tail_in(buffer)
    counts: Counter[int] = Counter()
    for _ in range(200):
        names, _ = take(buffer, 64)  # some sequences are longer
        assert len(names) == len(set(names))
        counts.update(names)
    for pool in (tail, names_kept(buffer) - tail):
        turns = [counts[name] for name in pool]
        assert not turns or max(turns) - 1 <= min(turns) >= 3


def test_a_batch_that_was_not_trained_on_comes_again() -> None:
    def batches(num_asked: int) -> tuple[list[list[int]], dict[str, Any]]:
        buffer = make_buffer()
        fill(buffer, 0, {n: 5 + 9 * (n % 4) for n in range(100, 120)})
        buffer.start_step(1)
        fill(buffer, 1, dict.fromkeys(range(200, 220), 9))
        given = []
        for _ in range(12):
            for _ in range(num_asked):
                buffer.next_batch(64)
            given.append(take(buffer, 64)[0])
        return given, buffer.state_dict()["values"]

    assert batches(0) == batches(1) == batches(3)


def test_order_does_not_depend_on_the_order_of_arrival() -> None:
    def names(lengths: dict[int, int]) -> list[list[int]]:
        buffer = make_buffer()
        fill(buffer, 0, lengths)
        return [take(buffer, 60)[0] for _ in range(8)]

    lengths = {n: 3 + n % 17 for n in range(100, 140)}
    assert names(lengths) == names(dict(reversed(lengths.items())))


def test_the_same_tokens_replace_what_was_there() -> None:
    buffer = make_buffer()
    buffer.add(make_sequence(100, 6))
    newer = dataclasses.replace(make_sequence(100, 6), features=torch.ones(5, HIDDEN_SIZE))
    take(buffer, 9)
    buffer.start_step(1)
    buffer.add(newer)
    assert buffer.num_bytes == bytes_of(6)
    assert torch.equal(buffer.next_batch(9).features, torch.ones(4, HIDDEN_SIZE))
    buffer.start_step(2)
    assert buffer.next_batch(9) is not None  # it is of step 1 now


def test_what_is_too_large_is_refused_and_what_has_no_row_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffer = make_buffer(data_bytes=bytes_of(10))
    with caplog.at_level(logging.WARNING):
        fill(buffer, 0, {1: 11, 2: 2, 4: 10})
    assert names_kept(buffer) == {4}
    [line] = caplog.records
    assert f"{bytes_of(11)} bytes exceed data_bytes={bytes_of(10)}" in line.getMessage()


@pytest.mark.parametrize("has_final_hidden", [False, True])
def test_resume_equals_straight_run(has_final_hidden: bool) -> None:
    def sequence(name: int, num_tokens: int) -> DraftSequence:
        plain = make_sequence(name, num_tokens)
        if not has_final_hidden:
            return plain
        mask = torch.arange(num_tokens) % 3 > 0
        return dataclasses.replace(
            plain,
            features=plain.features.repeat(1, 3),
            final_hidden=plain.features,
            loss_mask=mask,
        )

    def run(buffer: DataBuffer, start: int, end: int) -> list[Any]:
        seen: list[Any] = []
        for turn in range(start, end):
            chance = random.Random(turn)
            if turn % 9 == 8:
                buffer.start_step(buffer.step + 1)
            buffer.add(sequence(100 + turn, chance.randint(3, 60)))
            names, batch = take(buffer, 80)
            seen.append((names, batch.loss_mask.tolist()))
        return [*seen, buffer.state_dict()["values"]]

    straight = make_buffer(data_bytes=3 * bytes_of(300))
    run(straight, 0, 31)
    state = straight.state_dict()
    values = json.loads(json.dumps(state["values"]))
    tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}
    expected = run(straight, 31, 90)

    resumed = make_buffer(data_bytes=3 * bytes_of(300))
    resumed.add(sequence(5, 5))  # goes: a restored buffer holds what was saved
    resumed.load_state_dict({"tensors": tensors, "values": values})
    assert run(resumed, 31, 90) == expected

    smaller = make_buffer(data_bytes=3 * bytes_of(50))
    smaller.load_state_dict({"tensors": tensors, "values": values})
    assert 0 < smaller.num_bytes <= 3 * bytes_of(50)


def test_a_sequence_longer_than_a_batch_is_trained_window_by_window() -> None:
    """No batch exceeds its rows; over its turns every row of the sequence comes."""
    buffer = make_buffer()
    buffer.add(make_sequence(100, 90))
    whole = buffer.next_batch(1000)
    rows: set[tuple[float, ...]] = set()
    for _ in range(5):
        _, batch = take(buffer, 20)
        assert batch.num_rows == 20
        assert batch.position_ids.tolist() == list(range(20))
        rows |= {tuple(row) for row in batch.features.tolist()}
    assert rows == {tuple(row) for row in whole.features.tolist()}


def evicted_in_turn(buffer: Any, lengths: dict[int, int]) -> list[int]:
    """The sequences that go while these come, one at a time."""
    order: list[int] = []
    for name, num_tokens in lengths.items():
        before = names_kept(buffer) | {name}
        buffer.add(make_sequence(name, num_tokens))
        order += sorted(before - names_kept(buffer))
    return order


def test_eviction_takes_the_old_before_the_new_and_the_short_before_the_long() -> None:
    """The last step's tail is 103 (52 of its 90 rows); half of the budget is its own."""
    buffer = make_buffer(data_bytes=bytes_of(120))
    fill(buffer, 0, {101: 12, 102: 30, 103: 54})
    buffer.start_step(1)
    lengths = {200: 25, 201: 26, 202: 28, 203: 27, 204: 20, 205: 29}
    # 204 is shorter than all of its step, and so evicted as it comes.
    assert evicted_in_turn(buffer, lengths) == [101, 102, 200, 201, 204, 203]
    assert names_kept(buffer) == {103, 202, 205}


def test_of_several_earlier_steps_the_oldest_goes_first_and_a_tail_beyond_half_makes_room() -> None:
    buffer = make_buffer(keep_steps=2, data_bytes=bytes_of(100))
    for step, lengths in enumerate(({100: 18, 101: 24}, {110: 10, 111: 30}, {})):
        buffer.start_step(step)
        fill(buffer, step, lengths)
    assert tail_in(buffer) == {101, 111}  # 54 of 100
    assert evicted_in_turn(buffer, {200: 22, 201: 23, 202: 24}) == [100, 110, 101]
