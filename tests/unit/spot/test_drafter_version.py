"""What tells two drafters apart: every tensor and counter. tests/unit/models/test_checksum.py has the bits."""

from __future__ import annotations

import pytest

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
