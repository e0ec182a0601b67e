"""Steps on a group: k ranks = 1 rank, flags, skipped and abandoned steps, the schedule, and that it
learns.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.ranks import run_ranks
from tests.slow_draft import make_draft_model, make_sequence
from tests.spot_phases import world_group
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import DraftBatch, pack_batch
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.runtime.process_groups import SINGLE, Group

ALGORITHMS = ("eagle", "hass", "eagle3")


def make_trainer(algorithm: str = "eagle", group: Group = SINGLE, **settings) -> DrafterTrainer:
    model = make_draft_model("eagle3" if algorithm == "eagle3" else "eagle")
    section = DrafterSection(algorithm=algorithm, **settings)
    trainer = DrafterTrainer(model, section)
    trainer.group = group
    return trainer


def make_batches(model: DraftModel) -> list[DraftBatch]:
    """Unequal shares for three members."""
    lengths = ((9, 4), (6,), (12, 3, 5))
    return [pack_batch([make_sequence(model, n, seed=n) for n in share]) for share in lengths]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_equal_one_rank_on_the_union(algorithm: str) -> None:
    """The third member has no data, but its flags count."""

    def member() -> tuple[dict[str, torch.Tensor], list]:
        group = world_group()
        trainer = make_trainer(algorithm, group)
        batches = [*make_batches(trainer.model)[:2], None]
        flags = (1.0, float(group.rank == 2))
        stats = [trainer.step(batches[group.rank], lambda: flags) for _ in range(3)]
        return trainer.state_dict(), stats

    results = run_ranks(3, member)
    alone = make_trainer(algorithm)
    first, second, _ = make_batches(alone.model)
    sizes = (9, 4, 6)
    union = pack_batch([make_sequence(alone.model, n, seed=n) for n in sizes])
    assert union.num_rows == first.num_rows + second.num_rows
    expected = [alone.step(union) for _ in range(3)]
    for state, stats in results:
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)
        for actual, one in zip(stats, expected, strict=True):
            assert actual.flags == (3.0, 1.0)
            assert actual.loss == pytest.approx(one.loss)
            assert actual.grad_norm == pytest.approx(one.grad_norm)
            assert actual.agreement == pytest.approx(one.agreement)
            assert actual.accept_probability == pytest.approx(one.accept_probability)
            assert actual.num_tokens == one.num_tokens
        assert is_same(state, results[0][0])


def test_wrong_state_is_refused() -> None:
    trainer = make_trainer()
    state = trainer.state_dict()
    for change in ({"exp_avg.extra": torch.zeros(1)}, {"model.fc.bias": torch.zeros(3)}):
        with pytest.raises(ValueError, match=next(iter(change))):
            trainer.load_state_dict(state | change)
    del state["exp_avg.fc.bias"]
    with pytest.raises(ValueError, match=r"exp_avg\.fc\.bias"):
        trainer.load_state_dict(state)


def test_learning_rate_warms_up_over_the_whole_life_and_stays() -> None:
    trainer = make_trainer(lr=0.02)
    batch = make_batches(trainer.model)[0]
    rates = [trainer.step(batch).lr for _ in range(22)]
    assert rates == pytest.approx([0.001 * number for number in range(1, 21)] + [0.02, 0.02])


def test_the_average_is_over_the_last_tenth_of_all_updates_and_at_most_100() -> None:
    trainer = make_trainer()
    batch = make_batches(trainer.model)[0]
    expected = trainer.model.fc.weight.detach().clone()
    for number in (1, 2, 3, 2000):
        trainer.num_updates = number - 1
        trainer.step(batch)
        share = max(1 / (1 + number / 10), 1 / 100)
        expected = (1 - share) * expected + share * trainer.model.fc.weight
        torch.testing.assert_close(trainer.average["fc.weight"], expected)


def test_a_state_without_an_average_starts_one_at_its_weights() -> None:
    trained, trainer = make_trainer(), make_trainer()
    trained.step(make_batches(trained.model)[0])
    state = {n: t for n, t in trained.state_dict().items() if not n.startswith("average.")}
    trainer.load_state_dict(state)
    assert torch.equal(trainer.average["fc.weight"], trained.model.fc.weight)


def test_non_finite_gradient_skips_the_step_on_all_members() -> None:
    def member() -> tuple[bool, list, int, int]:
        group = world_group()
        trainer = make_trainer(group=group)
        before = trainer.model.fc.weight.clone()
        batch = make_batches(trainer.model)[group.rank]
        if group.rank == 1:
            batch.features[2] = math.nan
        poisoned = trainer.step(batch, lambda: (1.0, 0.0))
        is_same = torch.equal(before, trainer.model.fc.weight)
        good = trainer.step(make_batches(trainer.model)[0])
        return is_same, [poisoned, good], trainer.num_skipped, trainer.num_updates

    for is_same, (poisoned, good), num_skipped, num_updates in run_ranks(2, member):
        assert is_same
        assert poisoned.is_skipped
        assert poisoned.flags == (2.0, 0.0)
        assert not good.is_skipped
        assert math.isfinite(good.loss)
        assert (num_skipped, num_updates) == (1, 1)


def test_step_without_data_changes_nothing() -> None:
    trainer = make_trainer()
    before = copy_of(trainer)
    untrained = pack_batch([make_sequence(trainer.model, 5, loss_start=5)])
    for batch in (None, untrained):
        stats = trainer.step(batch, lambda: (1.0, 0.0))
        assert stats.is_skipped
        assert stats.num_tokens == 0
        assert stats.flags == (1.0, 0.0)
    assert trainer.num_skipped == 0  # that counts bad gradients
    assert is_same(trainer.state_dict(), before)


def test_gradient_is_clipped_to_the_given_norm() -> None:
    """Adam's first moment after one step is (1 - 0.9) times the gradient that it was given."""
    trainer = make_trainer(feature_weight=1e3)
    stats = trainer.step(make_batches(trainer.model)[0])
    moments = [t for name, t in trainer.state_dict().items() if name.startswith("exp_avg.")]
    norm = math.sqrt(sum(float(t.square().sum()) for t in moments))
    assert stats.grad_norm > 2.0
    assert norm == pytest.approx(0.1 * 1.0)


def test_bfloat16_step_is_near_the_exact_one() -> None:
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_draft_model("eagle3", dtype=torch.float32)
        model.lm_head_VD = model.lm_head_VD.to(dtype)
        trainer = DrafterTrainer(model, DrafterSection(algorithm="eagle3", lr=3e-3))
        batch = make_batches(model)[0]
        losses[dtype] = [trainer.step(batch).loss for _ in range(10)]
        assert model.fc.weight.dtype == torch.float32
    assert losses[torch.bfloat16] != losses[torch.float32]
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.03)


def test_objective_and_architecture_must_fit() -> None:
    with pytest.raises(ValueError, match=r"drafter\.algorithm='hass' cannot train"):
        DrafterTrainer(make_draft_model("eagle3"), DrafterSection(algorithm="hass"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_drafter_learns_to_agree_at_every_depth(algorithm: str) -> None:
    trainer = make_trainer(algorithm, lr=2e-2)
    batch = make_batches(trainer.model)[0]
    stats = [trainer.step(batch) for _ in range(80)]
    assert len(stats[0].agreement) == {"eagle": 1, "hass": 3, "eagle3": 5}[algorithm]
    for before, after in zip(stats[0].agreement, stats[-1].agreement, strict=True):
        assert before < 0.4 < 0.6 < after
    assert stats[-1].accept_length > stats[0].accept_length + 0.2


# ---- passes that are given up: when they are, and what is left of them


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
    """The member that gives up has most of its gradient by then."""
    whole = YesAt(None)
    make_trainer("hass").step(make_batch(make_trainer().model, 100), should_abandon=whole)

    def member() -> tuple[dict[str, torch.Tensor], int]:
        trainer = make_trainer("hass")
        trainer.group = world_group()
        rank = trainer.group.rank
        question = YesAt(whole.count if rank == 1 else None)
        stats = trainer.step(make_batch(trainer.model, 100 * rank), should_abandon=question)
        return trainer.state_dict(), stats.num_tokens

    results = run_ranks(3, member)
    alone = make_trainer("hass")
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
    trainer, straight = make_trainer("hass"), make_trainer("hass")
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
    trainer = make_trainer("hass")
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
