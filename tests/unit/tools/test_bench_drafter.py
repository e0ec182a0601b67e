"""The benchmark compares equal work: padding changes no sum."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.slow_draft import make_draft_model, make_sequence
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_loss import draft_loss, make_objective
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import pack_batch
from tools.bench.drafter import ASYNCHRONOUS, FULL, measure_blocking, pad_batch


def test_a_padded_batch_trains_the_same_rows_to_the_same_loss() -> None:
    model = make_draft_model("eagle")
    sequences = [
        make_sequence(model, num_tokens, seed=num_tokens, loss_start=start)
        for num_tokens, start in ((5, 0), (12, 4), (8, 3))
    ]
    packed, padded = pack_batch(sequences), pad_batch(sequences)
    assert packed.num_rows == 3 + 10 + 6
    assert padded.lengths == (10, 10, 10)
    objective = make_objective(DrafterSection(algorithm="hass"))
    one, other = (draft_loss(model, batch, objective) for batch in (packed, padded))
    assert one.count == other.count
    for name in ("loss_sum", "counts_K", "agreed_K", "accepted_K"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))


def test_blocking_is_measured_for_every_variant_and_round(tmp_path: Path) -> None:
    trainer = DrafterTrainer(make_draft_model("eagle"), DrafterSection())
    seconds = measure_blocking(trainer, tmp_path, rounds=2)
    assert seconds.keys() == {FULL, ASYNCHRONOUS}
    assert all(len(values) == 2 for values in seconds.values())
