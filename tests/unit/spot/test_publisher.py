"""Which candidates are published, on accept lengths given by hand, and how they are measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.slow_draft import make_draft_model, make_sequence
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import pack_batch
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.spot.publisher import DrafterPublisher, HoldoutResult, measure_holdout


def make_result(counts: list[float], accepted: list[float]) -> HoldoutResult:
    """A result with these sums, by unroll step."""
    return HoldoutResult(
        counts_K=torch.tensor(counts, dtype=torch.float64),
        accepted_K=torch.tensor(accepted, dtype=torch.float64),
    )


def weights(number: float) -> dict[str, Tensor]:
    return {"fc.weight": torch.full((2, 2), float(number))}


def consider(publisher: DrafterPublisher, number: int, new: float, old: float) -> bool:
    """Candidate `number` accepts `new`, and the published drafter `old`; nan: nothing was
    measured.
    """
    candidate = weights(number)
    measured, published = (
        make_result([0.0], [0.0]) if math.isnan(x) else make_result([100.0], [(x - 1.0) * 100.0])
        for x in (new, old)
    )
    checksum = checksum_tensors(candidate.items())
    return publisher.consider(candidate, checksum, measured=measured, published=published)


@pytest.mark.parametrize(
    "new, old, is_published",
    [
        (1.6, 1.5, True),
        (1.5, 1.5, True),
        (1.49, 1.5, False),
        (math.nan, 1.5, False),
        (math.nan, math.nan, False),
        (1.1, math.nan, True),
        (math.inf, 1.5, False),
    ],
)
def test_a_candidate_that_accepts_no_less_is_published(
    new: float, old: float, is_published: bool
) -> None:
    publisher = DrafterPublisher(weights(0))
    assert consider(publisher, 1, new, old) == is_published
    number = int(is_published)
    assert torch.equal(publisher.published.weights["fc.weight"], weights(number)["fc.weight"])
    assert publisher.published.checksum == checksum_tensors(weights(number).items())
    expected = {"drafter/version": number, "drafter/num_refused": 1 - number}
    assert publisher.metrics() == expected


def test_old_numbers_are_not_compared_with_new_ones() -> None:
    """The target has moved: the candidate accepts less than the published one did, and more than it
    does.
    """
    publisher = DrafterPublisher(weights(0))
    assert consider(publisher, 1, 1.8, 1.4)
    assert consider(publisher, 2, 1.5, 1.3)


def test_accept_length_is_of_the_sums() -> None:
    """Two steps: 12 of 20 rows accept the first, then 3 of 10 the second."""
    parts = [make_result([8.0, 4.0], [4.0, 1.0]), make_result([12.0, 6.0], [8.0, 2.0])]
    merged = HoldoutResult.merge(parts)
    assert merged.num_rows == 20
    assert merged.accept_length == pytest.approx(1 + 0.6 + 0.6 * 0.3)


def test_holdout_is_measured_with_the_given_weights_and_leaves_the_trainer_alone() -> None:
    trainer = DrafterTrainer(make_draft_model("eagle"), DrafterSection(algorithm="hass"))
    other = make_draft_model("eagle", seed=1).state_dict()
    own = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    batch = pack_batch([make_sequence(trainer.model, n, seed=n) for n in (9, 6, 12)])
    mine, theirs = (measure_holdout(trainer, w, batch) for w in (own, other))
    assert mine.counts_K.tolist() == theirs.counts_K.tolist() == [21.0, 18.0, 15.0]
    assert mine.accept_length != pytest.approx(theirs.accept_length)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, own[name])
    assert mine.accept_length == pytest.approx(trainer.step(batch).accept_length)
    broken = own | {"fc.weight": torch.full_like(own["fc.weight"], math.nan)}
    assert math.isnan(measure_holdout(trainer, broken, batch).accept_length)
