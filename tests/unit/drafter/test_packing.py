"""Which sequences share a batch, which are refused, and which of their tokens are trained on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.slow_draft import make_draft_model, make_sequence
from tlt_megatron.drafter.packing import pack_batch, pack_sequences
from tlt_megatron.types import DraftSequence


def test_packed_sequences_fill_batches_without_padding() -> None:
    """First fit, longest first: 12 | 9 1 | 5 4 | 3 2. One without rows is left out."""
    model = make_draft_model("eagle")
    lengths = [5, 3, 9, 1, 0, 4, 2, 12]
    batches = pack_sequences([make_sequence(model, n + 2, seed=n) for n in lengths], max_rows=10)
    assert [batch.lengths for batch in batches] == [(12,), (9, 1), (5, 4), (3, 2)]
    assert [batch.num_rows for batch in batches] == [12, 10, 9, 5]
    assert pack_sequences([], 10) == []


def test_wrong_sequences_are_refused() -> None:
    model = make_draft_model("eagle")
    sequence = make_sequence(model, 6)
    with pytest.raises(ValueError, match="features has 4 rows for 6 tokens"):
        DraftSequence(token_ids=sequence.token_ids, features=sequence.features[:4])


def test_observations_are_context_and_never_a_target() -> None:
    """Tokens 3 and 4 of 0..6 are an observation. A window keeps the mask of its own tokens."""
    model = make_draft_model("eagle")
    full = make_sequence(model, 7, loss_start=2)
    mask = torch.tensor([False, False, True, False, False, True, True])
    masked = dataclasses.replace(full, loss_mask=mask)
    assert pack_batch([masked]).loss_mask.tolist() == [True, False, False, True, True]
    assert pack_batch([full]).loss_mask.tolist() == [True] * 5
    together = pack_batch([full, masked])
    assert together.loss_mask.tolist() == [True] * 5 + [True, False, False, True, True]
    assert torch.equal(together.labels, pack_batch([full, full]).labels)
    assert pack_batch([masked.window(1, 3)]).loss_mask.tolist() == [False, False, True]
