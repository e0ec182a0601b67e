"""What is published, refused and restored. Accept lengths are given by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.slow_draft import make_draft_model, make_sequence
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_loss import make_objective
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import pack_batch
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.spot.holdout import HoldoutResult, measure_holdout
from tlt_megatron.spot.publisher import (
    DrafterPublisher,
    PublishAction,
    PublishDecision,
)


def result(*lengths: float, rows: float = 100.0) -> HoldoutResult:
    """One batch for each accept length, of one drafted token (so at most 2)."""
    return make_result([[rows] for _ in lengths], [[(length - 1.0) * rows] for length in lengths])


def make_result(counts: list[list[float]], accepted: list[list[float]]) -> HoldoutResult:
    """Of sums by batch and unroll step."""
    return HoldoutResult(
        counts_NK=torch.tensor(counts, dtype=torch.float64).reshape(len(counts), -1),
        accepted_NK=torch.tensor(accepted, dtype=torch.float64).reshape(len(counts), -1),
    )


def weights(number: float) -> dict[str, Tensor]:
    return {"fc.weight": torch.full((2, 2), float(number))}


class Target:
    """What each drafter accepts now, by the number in its weights; remembers who was measured."""

    def __init__(self, **lengths: float | Sequence[float]) -> None:
        self.lengths: dict[int, float | Sequence[float]] = {}
        self.move(**lengths)

    def move(self, **lengths: float | Sequence[float]) -> None:
        self.lengths |= {int(name.removeprefix("d")): value for name, value in lengths.items()}

    def __call__(self, given: Mapping[str, Tensor]) -> HoldoutResult:
        number = int(given["fc.weight"][0, 0])
        length = self.lengths[number]
        return result(*([length] * 4 if isinstance(length, (int, float)) else length))


def started() -> DrafterPublisher:
    return DrafterPublisher(weights(0))


def consider(
    publisher: DrafterPublisher,
    candidate: Mapping[str, Tensor],
    measure: Callable[[Mapping[str, Tensor]], HoldoutResult],
) -> PublishDecision:
    """Measure candidate, published and best drafter, and decide."""
    contenders = [candidate, publisher.published.weights, publisher.best.weights]
    measured = {checksum_tensors(one.items()): measure(one) for one in contenders}
    return publisher.consider(candidate, checksum_tensors(candidate.items()), measured)


def test_a_better_candidate_is_published_as_the_next_version() -> None:
    publisher, candidate = started(), weights(1)
    decision = consider(publisher, candidate, Target(d0=1.5, d1=1.6))
    assert decision.action == PublishAction.PUBLISH
    assert publisher.published is publisher.best
    assert publisher.published.version == 1
    candidate["fc.weight"].zero_()  # the trainer goes on; what was published stays
    assert torch.equal(publisher.published.weights["fc.weight"], weights(1)["fc.weight"])
    assert publisher.published.checksum == checksum_tensors(weights(1).items())
    assert decision.metrics["drafter/holdout_accept_length/candidate"] == pytest.approx(1.6)
    assert decision.metrics["drafter/version"] == 1.0


def test_a_worse_candidate_is_refused_and_counted() -> None:
    publisher = started()
    decision = consider(publisher, weights(1), Target(d0=1.5, d1=1.4))
    assert decision.action == PublishAction.KEEP
    assert publisher.published.version == 0
    assert decision.metrics["drafter/num_refused"] == 1.0
    assert "accepts 1.400, the best 1.500" in decision.reason


def test_old_numbers_are_not_compared_with_new_ones() -> None:
    """The target has moved: the candidate accepts less than the published one did, and more than it does."""
    publisher = started()
    target = Target(d0=1.4, d1=1.8, d2=1.5)
    consider(publisher, weights(1), target)
    target.move(d1=1.3)
    assert consider(publisher, weights(2), target).action == PublishAction.PUBLISH


def test_the_comparison_is_in_pairs() -> None:
    """Batches differ by far more than both drafters do, and always in the same way: that is no noise."""
    better = (1.2, 1.5, 1.7, 1.9)
    worse = tuple(length - 0.02 for length in better)
    publisher = started()
    decision = consider(publisher, weights(1), Target(d0=better, d1=worse))
    assert decision.action == PublishAction.KEEP


def test_less_within_the_noise_is_published() -> None:
    target = Target(d0=(1.5, 1.5, 1.5, 1.5), d1=(1.7, 1.3, 1.7, 1.28))
    assert consider(started(), weights(1), target).action == PublishAction.PUBLISH


def test_small_losses_do_not_add_up() -> None:
    """Each candidate is within the noise of the one before; only the best counts."""
    target = Target(d0=(1.6, 1.5, 1.6, 1.5))
    publisher = started()
    for number in range(1, 20):
        shift = 0.02 * number
        sign = 1 if number % 2 else -1
        target.move(**{f"d{number}": tuple(x - shift + sign * d for x, d in zip((1.6, 1.5, 1.6, 1.5), (0.05, -0.05, 0.05, -0.05), strict=True))})  # fmt: skip
        consider(publisher, weights(number), target)
    assert publisher.best.version == 0
    assert target(publisher.published.weights).accept_length > 1.5


def test_the_best_comes_back_where_the_published_one_falls_behind() -> None:
    publisher = started()
    target = Target(d0=(1.6, 1.5), d1=(1.5, 1.59))
    assert consider(publisher, weights(1), target).action == PublishAction.PUBLISH
    assert publisher.best.version == 0
    target.move(d1=(1.2, 1.2), d2=(1.1, 1.1))
    decision = consider(publisher, weights(2), target)
    assert decision.action == PublishAction.RESTORE
    assert publisher.published.version == 2  # versions only rise
    assert torch.equal(publisher.published.weights["fc.weight"], weights(0)["fc.weight"])
    assert publisher.best is publisher.published


def test_what_is_published_already_is_kept() -> None:
    decision = consider(started(), weights(0), Target(d0=1.5))
    assert decision.action == PublishAction.KEEP
    assert decision.metrics["drafter/num_refused"] == 0.0


def test_numbers_that_are_none_are_never_published() -> None:
    publisher = started()
    for candidate in ({"fc.weight": torch.tensor([[math.inf, 1.0]])}, weights(1)):
        decision = consider(publisher, candidate, lambda w: result(*([1.5, 1.5] if w is publisher.published.weights else [math.nan, 1.5])))  # fmt: skip
        assert decision.action == PublishAction.KEEP


def test_a_number_is_better_than_none() -> None:
    publisher = started()
    decision = consider(publisher, weights(1), Target(d0=math.nan, d1=1.1))
    assert decision.action == PublishAction.PUBLISH
    assert publisher.best.version == 1


def test_without_a_slice_candidates_are_published_unless_they_are_broken() -> None:
    publisher = started()
    empty = HoldoutResult(counts_NK=torch.zeros(0, 1), accepted_NK=torch.zeros(0, 1))
    assert consider(publisher, weights(1), lambda _: empty).action == PublishAction.PUBLISH
    broken = {"fc.weight": torch.tensor([[math.nan]])}
    assert consider(publisher, broken, lambda _: empty).action == PublishAction.KEEP


def test_restored_state_decides_as_if_never_saved() -> None:
    target = Target(d0=(1.6, 1.5), d1=(1.5, 1.59), d2=(1.4, 1.4), d3=(1.7, 1.7))
    straight = started()
    consider(straight, weights(1), target)  # published, while the best is another
    record = json.loads(json.dumps(straight.record(), allow_nan=False))
    resumed = started()
    earlier = {"alarm": "fell", "num_quiet": 2, "live_level": {"value": 3.0}}  # of earlier versions
    resumed.load_state_dict(straight.state_dict(), record | earlier)
    assert resumed.published.version == straight.published.version
    assert resumed.published.checksum == straight.published.checksum
    assert resumed.best.version == straight.best.version != straight.published.version
    for number in (2, 3):
        one, other = (consider(p, weights(number), target) for p in (straight, resumed))
        assert (one.action, one.metrics, one.reason) == (other.action, other.metrics, other.reason)
    fresh = started()
    resumed.load_state_dict(fresh.state_dict(), json.loads(json.dumps(fresh.record())))
    assert math.isnan(resumed.best_accept_length)
    assert resumed.best is resumed.published
    with pytest.raises(ValueError, match=r"last\.fc is unknown"):
        resumed.load_state_dict({"last.fc": torch.zeros(1)}, record)


def test_standard_error_of_one_step_is_that_of_the_mean_difference() -> None:
    one, other = result(1.5, 1.7, 1.2), result(1.4, 1.75, 1.25)
    differences = torch.tensor([0.1, -0.05, -0.05], dtype=torch.float64)
    expected = differences.std().item() / math.sqrt(3)
    assert one.standard_error(other) == pytest.approx(expected)
    assert result(1.5).standard_error(result(1.4)) == 0.0


def test_accept_length_is_of_the_sums() -> None:
    """Two steps: 12 of 20 rows accept the first, then 3 of 10 the second."""
    parts = [
        make_result([[8.0, 4.0]], [[4.0, 1.0]]),
        make_result([[12.0, 6.0]], [[8.0, 2.0]]),
    ]
    merged = HoldoutResult.merge(parts)
    assert merged.num_rows == 20
    assert merged.accept_length == pytest.approx(1 + 0.6 + 0.6 * 0.3)


def test_holdout_is_measured_with_the_given_weights_and_leaves_the_trainer_alone() -> None:
    section = DrafterSection(algorithm="hass", lr=0.0001)
    objective = replace(make_objective(section), num_steps=2)
    trainer = DrafterTrainer(make_draft_model("eagle"), section, objective=objective)
    other = make_draft_model("eagle", seed=1).state_dict()
    own = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    batches = [pack_batch([make_sequence(trainer.model, n, seed=n)]) for n in (9, 6, 12)]
    mine, theirs = (measure_holdout(trainer, w, batches) for w in (own, other))
    assert mine.counts_NK.tolist() == [[7.0, 6.0], [4.0, 3.0], [10.0, 9.0]]
    assert torch.equal(mine.counts_NK, theirs.counts_NK)
    nothing = measure_holdout(trainer, own, [])  # of a rank without hold-out sequences
    assert math.isnan(nothing.accept_length)
    assert HoldoutResult.merge([nothing, mine]).accept_length == mine.accept_length
    assert mine.accept_length != pytest.approx(theirs.accept_length)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, own[name])
    union = pack_batch([make_sequence(trainer.model, n, seed=n) for n in (9, 6, 12)])
    assert mine.accept_length == pytest.approx(trainer.step(union).accept_length)
