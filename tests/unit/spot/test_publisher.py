"""Which candidates are published, on passes given by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.spot.holdout import Comparison
from tlt_megatron.spot.publisher import DrafterPublisher


def make_comparison(
    tokens: list[float], candidate: list[float], published: list[float]
) -> Comparison:
    """Passes by block."""
    values = (torch.tensor(x, dtype=torch.float64) for x in (tokens, candidate, published))
    return Comparison(**dict(zip(("tokens_B", "candidate_B", "published_B"), values, strict=True)))


def weights(number: float) -> dict[str, Tensor]:
    return {"fc.weight": torch.full((2, 2), float(number))}


def consider(publisher: DrafterPublisher, number: int, new: float, old: float) -> bool:
    """Candidate `number` needs `new` passes for 120 tokens, and the published drafter `old`. In
    half of the tokens it saves as many passes more as in the other half less.
    """
    candidate = weights(number)
    half, spread = (new / 2, old / 2), 1.0
    comparison = make_comparison([60.0, 60.0], [half[0] - spread, half[0] + spread], [half[1]] * 2)
    return publisher.consider(candidate, checksum_tensors(candidate.items()), comparison)


@pytest.mark.parametrize(
    "new, old, is_published", [(40, 42, True), (40, 40.5, False), (40, 40, False), (41, 40, False)]
)
def test_a_candidate_that_accepts_more_than_chance_explains_is_published(
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
    assert consider(publisher, 1, 60, 80)
    assert consider(publisher, 2, 70, 90)


def test_accept_lengths_are_of_the_blocks_of_all_ranks() -> None:
    """The blocks save 2, 0, 1 and 1 passes, where 1 is the mean."""
    parts = [
        make_comparison([30.0, 30.0], [8.0, 10.0], [10.0, 10.0]),
        make_comparison([30.0, 30.0], [9.0, 9.0], [10.0, 10.0]),
    ]
    merged = Comparison.merge(parts)
    assert merged.num_tokens == 120
    assert merged.accept_lengths == pytest.approx((120 / 36, 3.0))
    # d(T / N) = T / N^2 dN, and the sum of four blocks with deviations 1, -1, 0, 0
    assert merged.standard_error == pytest.approx(math.sqrt(2) * 120 / (36 * 40))
