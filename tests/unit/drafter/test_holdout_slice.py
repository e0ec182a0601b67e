"""Which held-out sequences candidates are compared on: the newest, of all lengths, within a budget of rows."""

from __future__ import annotations

import random

import pytest
import torch

from tests.slow_draft import make_draft_model, make_sequence
from tlt_megatron.config.schema import SpotSection
from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.packing import choose_slice


def test_the_slice_has_the_lengths_of_the_step_and_not_its_longest() -> None:
    """100 responses with a long tail: the median of the slice is that of all; with the longest first it was 20 times that."""
    rng = random.Random(0)
    rows = [round(10 * rng.paretovariate(1.0)) for _ in range(100)]
    chosen = [rows[i] for i in choose_slice([3] * 100, rows, 2 * sum(rows) // 5)]
    assert 10 < len(chosen) < 60
    median = sorted(rows)[50]
    assert median / 1.5 < sorted(chosen)[len(chosen) // 2] < 1.5 * median


def test_every_length_keeps_its_share_of_the_rows() -> None:
    rows = [10] * 25 + [20] * 25 + [40] * 25 + [80] * 25
    random.Random(1).shuffle(rows)
    chosen = choose_slice([0] * 100, rows, 1000)
    assert sorted(rows[i] for i in chosen) == sorted(6 * [10, 20, 40, 80])


def test_older_steps_fill_what_the_newest_leaves() -> None:
    steps, rows = [5, 6, 5, 6, 5, 5], [10, 30, 20, 50, 30, 40]
    assert set(choose_slice(steps, rows, 80)) == {1, 3}
    assert set(choose_slice(steps, rows, 180)) == set(range(6))


def test_the_first_round_is_measured_however_long() -> None:
    rows = [5000, 6000, 100, 200, 300, 7000, 8000, 9000]
    assert len(choose_slice([1] * 8, rows, 512)) == 4
    assert choose_slice([], [], 512) == []
    assert choose_slice([2], [4000], 512) == [0]


@pytest.mark.parametrize("budget", [60, 120])
def test_the_buffer_gives_short_and_long_sequences_within_the_budget(budget: int) -> None:
    buffer = DataBuffer(SpotSection(), torch.float64, holdout_share=0.999)
    model = make_draft_model("eagle")
    for step in (0, 1):
        buffer.start_step(step)
        for index in range(24):
            length = 3 + 2 * index + step
            buffer.add(make_sequence(model, length, seed=100 * step + index), step)
    batches = buffer.holdout_batches(32, max_rows=budget)
    lengths = sorted(length for batch in batches for length in batch.lengths)
    assert 0.4 * budget <= sum(lengths) <= max(budget, 120)
    assert lengths[0] <= 16 < 28 <= lengths[-1]
    assert all(length % 2 for length in lengths) != all(length % 2 == 0 for length in lengths)
