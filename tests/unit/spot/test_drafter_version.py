"""What tells two drafters apart: every bit, every place, every counter."""

from __future__ import annotations

import random

import pytest
import torch

from tests.spot_phases import RandomBatches, make_drafter_trainer
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.spot.session import version_of


@pytest.fixture
def trainer() -> DrafterTrainer:
    """With moments that are not zero."""
    trainer = make_drafter_trainer()
    trainer.step(RandomBatches(trainer.model, seed=0).next_batch())
    return trainer


def test_equal_drafters_have_equal_versions(trainer: DrafterTrainer) -> None:
    other = make_drafter_trainer()
    assert version_of(other) != version_of(trainer)
    other.load_state_dict(trainer.state_dict())
    assert version_of(other) == version_of(trainer)


def test_weights_moments_and_counters_all_show(trainer: DrafterTrainer) -> None:
    seen = {version_of(trainer).checksum}
    state = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    for name in state:
        trainer.load_state_dict(state | {name: state[name] + 1})
        seen.add(version_of(trainer).checksum)
    assert len(seen) == 1 + len(state)


def test_every_flipped_bit_shows(trainer: DrafterTrainer) -> None:
    """63 bits: two of 300 checksums are equal by chance once in 10^14 runs."""
    rng = random.Random(5)
    weights = trainer.model.fc.weight.data.view(-1).view(torch.int64)  # float64
    seen = {version_of(trainer).checksum}
    for bit in [*range(64), *(rng.randrange(64) for _ in range(236))]:
        at = rng.randrange(weights.numel())
        mask = torch.tensor(1).bitwise_left_shift(bit)
        weights[at] ^= mask
        seen.add(version_of(trainer).checksum)
        weights[at] ^= mask
    assert version_of(trainer).checksum in seen
    assert len(seen) > 290  # a pair of place and bit may have been drawn twice


def test_changed_places_and_signs_show(trainer: DrafterTrainer) -> None:
    before = version_of(trainer)
    moments = [trainer.state_dict()[f"{name}.fc.weight"] for name in ("exp_avg", "exp_avg_sq")]
    first, second = (moment.clone() for moment in moments)
    moments[0].copy_(second)
    moments[1].copy_(first)
    assert version_of(trainer) != before
    moments[0].copy_(first)
    moments[1].copy_(second)
    assert version_of(trainer) == before
    flat = trainer.model.fc.weight.data.view(-1)
    flat[[3, 8]] = flat[[8, 3]]
    assert version_of(trainer) != before
    flat[[3, 8]] = flat[[8, 3]]
    flat[[3, 8]] *= -1  # two sign bits, which cancel in a plain sum of products
    assert version_of(trainer) != before
