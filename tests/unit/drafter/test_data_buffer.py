"""The buffer of drafter data: bytes, turns, the hold-out, and a resume that changes nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections import Counter
from typing import Any

import pytest
import torch

from tests.draft_data import (
    ALL,
    HIDDEN_SIZE,
    bytes_of,
    fill,
    make_buffer,
    make_sequence,
    names_in,
    num_tail,
)
from tlt_megatron.config.schema import SpotSection
from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.packing import DraftSequence


def test_budget_is_never_exceeded_and_everything_is_accounted_for() -> None:
    chance = random.Random(3)
    budget = bytes_of(300)
    buffer = make_buffer(data_bytes=budget, holdout_share=0.2)
    added_bytes = 0
    for name in range(600):
        if chance.random() < 0.03:
            buffer.start_step(buffer.step + chance.choice((1, 1, 2)))
        num_tokens = chance.randint(3, 20) if chance.random() < 0.8 else chance.randint(20, 290)
        step = max(0, buffer.step - chance.randint(0, 1))
        buffer.add(make_sequence(name, num_tokens), step)
        added_bytes += bytes_of(num_tokens)
        tensors = buffer.state_dict()["tensors"].values()
        assert buffer.num_bytes == sum(tensor.nbytes for tensor in tensors) <= budget
        assert all(t.nbytes == t.untyped_storage().nbytes() for t in tensors)
        if name % 5 == 0:
            batch = buffer.next_batch(64)
            assert batch is None or batch.num_rows <= 64 or len(batch.lengths) == 1
    assert 0 < sum(sample.num_bytes for sample in buffer._samples.values()) == buffer.num_bytes
    assert buffer.num_bytes < added_bytes


def test_rows_equal_the_definition() -> None:
    buffer = make_buffer(**ALL)
    fill(buffer, 0, {50: 5, 60: 3, 70: 9})
    batch = buffer.next_batch(100)
    row = 0
    for name, length in zip(names_in(batch), batch.lengths, strict=True):
        tokens = [name, *range(1, length + 2)]
        for t in range(length):
            assert batch.token_ids[row] == tokens[t + 1]
            assert batch.labels[row] == tokens[t + 2]
            assert batch.position_ids[row] == t
            assert batch.features[row].tolist() == [name, t, 0, 0]
            assert batch.target_hidden[row].tolist() == [name, t + 1, 0, 0]
            assert batch.loss_mask[row].item()
            row += 1
    assert row == batch.num_rows == 3 + 1 + 7


def test_states_are_kept_in_the_buffers_dtype_and_detached_from_the_source() -> None:
    buffer = DataBuffer(SpotSection(), torch.bfloat16, **ALL)
    wide = torch.randn(6, 3 * HIDDEN_SIZE, dtype=torch.float64, requires_grad=True)
    final = torch.randn(6, HIDDEN_SIZE, dtype=torch.float64)
    expected = wide[:4].detach().bfloat16(), final[1:5].bfloat16()
    sequence = DraftSequence(token_ids=torch.arange(6), features=wide, final_hidden=final)
    buffer.add(sequence, 0)
    final.zero_()
    batch = buffer.next_batch(9)
    assert torch.equal(batch.features, expected[0])
    assert torch.equal(batch.target_hidden, expected[1])
    assert not batch.features.requires_grad


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_long_tail_has_its_share_of_the_rows(share: float) -> None:
    chance = random.Random(5)
    buffer = make_buffer(long_tail_share=share, **ALL)
    lengths = {n: chance.randint(5, 20) for n in range(100, 160)}
    lengths |= {n: chance.randint(60, 130) for n in range(160, 176)}
    fill(buffer, 0, lengths)
    buffer.start_step(1)
    fill(buffer, 1, {n: chance.randint(5, 30) for n in range(200, 260)})
    tail, total = set(), sum(n - 2 for n in lengths.values())
    for name in sorted(lengths, key=lambda n: -lengths[n]):  # the longest, until they have half
        if 2 * sum(lengths[n] - 2 for n in tail) < total:
            tail.add(name)
    num_tail = num_rows = 0
    for _ in range(150):
        batch = buffer.next_batch(400)
        num_rows += batch.num_rows
        names = names_in(batch)
        num_tail += sum(r for r, n in zip(batch.lengths, names, strict=True) if n in tail)
    assert num_tail / num_rows == pytest.approx(share, abs=0.02)
    assert num_rows > 0.95 * 150 * 400  # batches are full, but for the end of an epoch


def test_without_a_tail_or_without_the_rest_batches_are_full_of_the_other() -> None:
    buffer = make_buffer(long_tail_share=0.5, **ALL)
    fill(buffer, 0, dict.fromkeys(range(100, 120), 12))
    assert buffer.next_batch(100).num_rows == 100  # the first step has no step before it
    buffer.start_step(1)
    assert num_tail(buffer) == 20
    assert buffer.next_batch(100).num_rows == 100  # nobody has finished yet
    buffer.add(make_sequence(200, 22), 1)
    for _ in range(3):  # the rest cannot fill its half
        batch = buffer.next_batch(100)
        assert batch.num_rows == 100
        assert names_in(batch).count(200) == 1


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_nobodys_turn_comes_twice_before_everybody_had_one(share: float) -> None:
    chance = random.Random(1)
    buffer = make_buffer(long_tail_share=share, **ALL)
    lengths = {n: chance.choice((3, 7, 15)) for n in range(100, 136)} | dict.fromkeys(
        range(136, 140), 90
    )
    fill(buffer, 0, lengths)
    buffer.start_step(1)
    fill(buffer, 1, {n: chance.randint(3, 90) for n in range(200, 230)})
    tail = set(range(136, 140)) if share else set()
    assert num_tail(buffer) == 4
    counts: Counter[int] = Counter()
    for _ in range(200):
        names = names_in(buffer.next_batch(64))  # some sequences are longer
        assert len(names) == len(set(names))
        counts.update(names)
        for pool in (tail, {*lengths, *range(200, 230)} - tail):
            turns = [counts[name] for name in pool]
            assert not turns or max(turns) - min(turns) <= 1
    assert len(counts) == 70
    assert min(counts.values()) >= 4


def test_a_newcomer_joins_the_running_epoch() -> None:
    buffer = make_buffer(holdout_share=0.3)
    fill(buffer, 0, dict.fromkeys(range(100, 130), 10))
    for _ in range(50):
        buffer.next_batch(40)
    newcomers = range(200, 210)
    fill(buffer, 0, dict.fromkeys(newcomers, 10))
    counts: Counter[int] = Counter()
    for _ in range(20):
        counts.update(names_in(buffer.next_batch(40)))
    assert max(counts.values()) - min(counts.values()) <= 2
    assert counts.keys() & set(newcomers)


def test_a_batch_that_is_put_back_was_never_taken() -> None:
    """Of three batches in a row the middle one; with a long tail, whose balance counts too."""

    def batches(num_put_back: int) -> tuple[list[list[int]], dict[str, Any]]:
        buffer = make_buffer(**ALL)
        fill(buffer, 0, {n: 5 + 9 * (n % 4) for n in range(100, 120)})
        buffer.start_step(1)
        fill(buffer, 1, dict.fromkeys(range(200, 220), 9))
        given = [names_in(buffer.next_batch(64))]
        for _ in range(num_put_back):
            buffer.next_batch(64)
            buffer.put_back()
        given += [names_in(buffer.next_batch(64)) for _ in range(12)]
        return given, buffer.state_dict()["values"]

    assert batches(0) == batches(1) == batches(3)


def test_order_does_not_depend_on_the_order_of_arrival() -> None:
    def names(lengths: dict[int, int]) -> list[list[int]]:
        buffer = make_buffer(**ALL)
        fill(buffer, 0, lengths)
        return [names_in(buffer.next_batch(60)) for _ in range(8)]

    lengths = {n: 3 + n % 17 for n in range(100, 140)}
    backwards = dict(reversed(lengths.items()))
    assert names(lengths) == names(backwards)


def test_held_out_sequences_are_the_same_everywhere_and_never_trained_on() -> None:
    """Of 400, 80 are expected; more than 5 standard deviations (8 each) off happens once in 1.7 million."""
    trained: set[int] = set()
    held_out = []
    for _ in range(2):
        buffer = make_buffer(holdout_share=0.2)
        for step, first in ((0, 100), (1, 300)):
            buffer.start_step(step)
            fill(buffer, step, dict.fromkeys(range(first, first + 200), 8))
            for _ in range(100):
                trained |= set(names_in(buffer.next_batch(64)))
        batches = buffer.holdout_batches(50)
        assert all(batch.num_rows <= 50 for batch in batches)
        held_out.append(sorted(name for batch in batches for name in names_in(batch)))
        assert sum(s.is_held_out for s in buffer._samples.values()) == len(held_out[-1])
    assert held_out[0] == held_out[1]
    assert 40 <= len(held_out[0]) <= 120
    assert trained.isdisjoint(held_out[0])
    assert trained | set(held_out[0]) == set(range(100, 500))
    assert make_buffer().holdout_batches(50) == []


def test_the_same_tokens_replace_what_was_there() -> None:
    buffer = make_buffer(**ALL)
    buffer.add(make_sequence(100, 6), 0)
    newer = dataclasses.replace(make_sequence(100, 6), features=torch.ones(5, HIDDEN_SIZE))
    buffer.start_step(1)
    buffer.add(newer, 1)
    assert buffer.num_bytes == bytes_of(6)
    assert torch.equal(buffer.next_batch(9).features, torch.ones(4, HIDDEN_SIZE))
    assert len(buffer._samples) == 1
    buffer.start_step(2)
    assert buffer.next_batch(9) is not None  # it is of step 1 now


def test_what_is_refused_is_said(caplog: pytest.LogCaptureFixture) -> None:
    buffer = make_buffer(data_bytes=bytes_of(10), **ALL)
    buffer.start_step(5)
    with caplog.at_level(logging.WARNING):
        assert not buffer.add(make_sequence(1, 11), 5)
        assert not buffer.add(make_sequence(2, 2), 5)
        assert not buffer.add(make_sequence(3, 8), 3)
    assert buffer.add(make_sequence(4, 10), 5)
    assert len(buffer._samples) == 1
    said = [record.getMessage() for record in caplog.records]
    assert f"{bytes_of(11)} bytes exceed data_bytes={bytes_of(10)}" in said[0]
    assert "2 tokens make no row" in said[1]
    assert "of step 3, and this is step 5" in said[2]


def test_steps_only_rise() -> None:
    buffer = make_buffer()
    buffer.start_step(3)
    with pytest.raises(ValueError, match="step=4: the buffer is at step 3"):
        buffer.add(make_sequence(1, 5), 4)
    with pytest.raises(ValueError, match="step=2: the buffer is at step 3"):
        buffer.start_step(2)


@pytest.mark.parametrize("has_final_hidden", [False, True])
def test_resume_equals_straight_run(has_final_hidden: bool) -> None:
    settings = {"data_bytes": 3 * bytes_of(300), "holdout_share": 0.1, "long_tail_share": 0.4}

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
            buffer.add(sequence(100 + turn, chance.randint(3, 60)), buffer.step)
            batch = buffer.next_batch(80)
            held_out = [names_in(b) for b in buffer.holdout_batches(80)]
            found = batch and (names_in(batch), batch.labels.tolist(), batch.loss_mask.tolist())
            seen.append((found, held_out))
        return [*seen, buffer.state_dict()["values"]]

    straight = make_buffer(**settings)
    run(straight, 0, 31)
    state = straight.state_dict()
    values = json.loads(json.dumps(state["values"]))
    tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}
    expected = run(straight, 31, 90)

    resumed = make_buffer(**settings)
    resumed.add(sequence(5, 5), 0)  # goes: a restored buffer holds what was saved
    resumed.load_state_dict({"tensors": tensors, "values": values})
    assert run(resumed, 31, 90) == expected

    smaller = make_buffer(**settings | {"data_bytes": 3 * bytes_of(100)})
    smaller.load_state_dict({"tensors": tensors, "values": values})
    assert 0 < smaller.num_bytes <= 3 * bytes_of(100)
    assert len(smaller._samples) < len(values["samples"])


def test_a_sequence_longer_than_a_batch_is_trained_window_by_window() -> None:
    """No batch exceeds its rows; over its turns every row of the sequence comes."""
    buffer = make_buffer(**ALL)
    buffer.add(make_sequence(100, 90), 0)
    whole = buffer.next_batch(1000)
    rows: set[tuple[float, ...]] = set()
    for _ in range(6):
        batch = buffer.next_batch(20)
        assert batch.num_rows == 20
        assert batch.position_ids.tolist() == list(range(20))
        rows |= {tuple(row) for row in batch.features.tolist()}
    assert rows == {tuple(row) for row in whole.features.tolist()}
    buffer.put_back()
    again = buffer.next_batch(20)  # a batch that was put back is the next one
    assert torch.equal(again.features, batch.features)
