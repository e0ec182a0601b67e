"""Passes that are given up: when they are, what is left of them, and what the other members make of the step."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ranks import run_ranks
from tests.slow_draft import make_draft_model, make_sequence
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import DraftBatch, pack_batch
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.runtime.process_groups import group_of

ALGORITHMS = ("eagle", "hass", "eagle3")


def make_trainer(algorithm: str = "hass") -> DrafterTrainer:
    model = make_draft_model("eagle3" if algorithm == "eagle3" else "eagle")
    return DrafterTrainer(model, DrafterSection(algorithm=algorithm))


def make_batch(model: DraftModel, seed: int = 0) -> DraftBatch:
    return pack_batch([make_sequence(model, n, seed=seed + n) for n in (9, 5)])


class YesAt:
    """Says yes when it is asked for the n-th time, and from then on."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.count = 0

    def __call__(self) -> bool:
        self.count += 1
        return self.number is not None and self.count >= self.number


def copy_of(trainer: DrafterTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state_dict().items()}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_pass_given_up_anywhere_leaves_the_state_and_the_next_step_as_they_were(
    algorithm: str,
) -> None:
    trainer, straight = make_trainer(algorithm), make_trainer(algorithm)
    first, second = (make_batch(trainer.model, seed) for seed in (0, 50))
    asked = YesAt(None)
    assert not trainer.step(first, should_abandon=asked).is_skipped
    straight.step(first)
    assert is_same(trainer.state_dict(), straight.state_dict())
    # Forward and backward, of at least seven matrices at each step of the unroll.
    num_steps = {"eagle": 1, "hass": 3, "eagle3": 5}[algorithm]
    assert asked.count > 2 * 7 * num_steps - 4
    before = copy_of(trainer)
    for number in range(1, asked.count + 1):
        question = YesAt(number)
        stats = trainer.step(second, lambda: (2.0, 0.0), question)
        assert question.count == number  # nothing is computed after a yes
        assert stats.is_skipped
        assert stats.num_tokens == 0
        assert math.isnan(stats.loss)
        assert stats.flags == (2.0, 0.0)
    assert is_same(trainer.state_dict(), before)
    assert trainer.num_skipped == 0
    assert trainer.step(second) == straight.step(second)
    assert is_same(trainer.state_dict(), straight.state_dict())


def test_members_that_finish_their_pass_make_the_step_without_the_one_that_does_not() -> None:
    """Which has most of its gradient by then."""
    whole = YesAt(None)
    make_trainer().step(make_batch(make_trainer().model, 100), should_abandon=whole)

    def member() -> tuple[dict[str, torch.Tensor], int]:
        trainer = make_trainer()
        trainer.group = group_of(torch.distributed.group.WORLD)
        rank = trainer.group.rank
        question = YesAt(whole.count if rank == 1 else None)
        stats = trainer.step(make_batch(trainer.model, 100 * rank), should_abandon=question)
        return trainer.state_dict(), stats.num_tokens

    results = run_ranks(3, member)
    alone = make_trainer()
    lengths = [(n, seed) for seed in (0, 200) for n in (9, 5)]
    union = pack_batch([make_sequence(alone.model, n, seed=seed + n) for n, seed in lengths])
    expected = alone.step(union)
    for state, num_tokens in results:
        assert num_tokens == expected.num_tokens
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)


def test_a_batch_that_does_not_fit_is_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, straight = make_trainer(), make_trainer()
    batch = make_batch(trainer.model)

    def fail() -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.80 GiB.")

    before = copy_of(trainer)
    stats = trainer.step(batch, should_abandon=fail)
    assert (stats.is_out_of_memory, stats.is_skipped, stats.num_tokens) == (True, True, 0)
    assert "batch left out" in caplog.text
    assert is_same(trainer.state_dict(), before)
    assert not trainer.step(batch).is_out_of_memory
    straight.step(batch)
    assert is_same(trainer.state_dict(), straight.state_dict())


def test_an_error_of_who_is_asked_passes_on_and_nobody_is_asked_any_more() -> None:
    trainer = make_trainer()
    count = 0

    def fail() -> bool:
        nonlocal count
        count += 1
        if count == 40:  # in the backward pass
            raise OSError("the store is gone")
        return False

    batch = make_batch(trainer.model)
    with pytest.raises(OSError, match="the store is gone"):
        trainer.step(batch, should_abandon=fail)
    trainer.step(batch)
    assert count == 40
