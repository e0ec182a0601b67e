"""The exponential race gives independent Exp(1) numbers, within a block of 64 token ids and between blocks.

Statistical tests have fixed seeds; each would raise a false alarm with probability 1e-4 if its seeds were drawn anew.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.unit.speculation.test_sampling import ALARM, chi_square_p, seeds
from tlt_megatron.speculation.sampling import gumbel_noise, sample

COUNT, VOCAB = 4000, 160  # two whole blocks and a part of a third


@pytest.fixture(scope="module")
def uniform_BV() -> Tensor:
    """exp(-E) of each number of the race: uniform if E is Exp(1)."""
    noise_BV = gumbel_noise(seeds(COUNT), torch.arange(COUNT) % 23, VOCAB)
    return torch.exp(-torch.exp(-noise_BV))


def test_every_number_is_exp_1(uniform_BV: Tensor) -> None:
    """Each place of a block alone, and where most of the smallest of a block are: below 1 / 64."""
    cells = (uniform_BV * 8).long()
    even = torch.full((8,), 1 / 8)
    for token in range(VOCAB):
        assert chi_square_p(torch.bincount(cells[:, token], minlength=8), even) > ALARM / VOCAB
    race = -uniform_BV.log().flatten()
    small = race[race < 1 / 64]
    assert abs(len(small) / len(race) - (1 - math.exp(-1 / 64))) < 6e-4
    counts = torch.bincount((small * 64 * 32).long().clamp(max=31), minlength=32)
    edges = torch.linspace(0, 1 / 64, 33, dtype=torch.float64)
    probs = (-edges).exp().diff().neg() / (1 - math.exp(-1 / 64))
    assert chi_square_p(counts, probs) > ALARM


def test_numbers_are_not_correlated(uniform_BV: Tensor) -> None:
    """All pairs of tokens, as ranks and as E: each correlation is normal with deviation 1 / sqrt(COUNT)."""
    for values in (uniform_BV, -uniform_BV.log(), (uniform_BV > 0.9).double()):
        correlations = torch.corrcoef(values.T)
        pairs = correlations[torch.triu_indices(VOCAB, VOCAB, 1).unbind()] * math.sqrt(COUNT)
        assert pairs.abs().max() < 6.0
        assert abs(float(pairs.square().mean()) - 1.0) < 0.05


@pytest.mark.parametrize("tokens", [(3, 40), (0, 63), (10, 70), (64, 127)])
def test_two_tokens_are_independent(uniform_BV: Tensor, tokens: tuple[int, int]) -> None:
    """Joint table of two tokens of a block, or of two, with the cells that a shared smallest number would fill."""
    edges = torch.tensor([0.5, 0.9, 0.97, 0.99], dtype=torch.float64)
    cells = [torch.bucketize(uniform_BV[:, token].contiguous(), edges) for token in tokens]
    probs = torch.cat((edges, edges.new_ones(1))).diff(prepend=edges.new_zeros(1))
    counts = torch.bincount(cells[0] * 5 + cells[1], minlength=25)
    assert chi_square_p(counts, torch.outer(probs, probs).flatten()) > ALARM


def test_drawn_tokens_follow_the_softmax_over_several_blocks() -> None:
    """Probability in one block, and in another, and spread over both."""
    count = 20_000
    logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5
    logits_V[[5, 6, 130]] += 3.0
    drawn = sample(logits_V.expand(count, -1), seeds(count), torch.zeros(count).long(), 1.0)
    counts = torch.bincount(drawn.token_ids_B, minlength=VOCAB)
    assert chi_square_p(counts, logits_V.softmax(0)) > ALARM
