"""The search for the noise-keyed sample gives the token of the plain definition, bit for bit, on
any logits.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tlt_megatron.speculation import noise
from tlt_megatron.speculation.sampling import (
    cut_logits,
    gumbel_noise,
    noisy_argmax,
    request_seed,
    row_keys,
    sample,
)
from tlt_megatron.types import SamplingParams

REAL = 20_011  # a vocabulary that is searched for 8 rows, with tokens after the last whole block


def plain(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor) -> list[int]:
    noise_BV = gumbel_noise(seeds_B, positions_B, logits_BV.shape[1])
    return noise_BV.add_(logits_BV).argmax(dim=1).tolist()


def searched(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor) -> list[int]:
    return noise.noisy_argmax(logits_BV, row_keys(seeds_B, positions_B)).tolist()


def draws(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Seeds and positions."""
    seeds_B = torch.tensor([request_seed(seed, row // 8, row % 8) for row in range(num_rows)])
    return seeds_B, torch.arange(num_rows) * 37 % 101


def normal(num_rows: int, vocab_size: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    vocab_size=st.sampled_from([64, 65, 1000, 4096, 4133, 33_000]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 4.0, 30.0, 1e6, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    levels=st.sampled_from([0, 2, 30]),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 10_000),
)
def test_search_equals_the_plain_argmax(
    vocab_size: int, scale: float, dtype: torch.dtype, levels: int, masked: float, seed: int
) -> None:
    """`levels`: logits take few values, so many are equal. `masked`: share of tokens at -inf."""
    logits_BV = normal(6, vocab_size, seed)
    if levels:
        logits_BV = (logits_BV * levels / 8).round() * 8 / levels
    logits_BV = (scale * logits_BV).to(dtype)
    hidden_BV = normal(6, vocab_size, seed + 1).abs() < masked * 3
    hidden_BV[:, seed % vocab_size] = False
    logits_BV = logits_BV.masked_fill(hidden_BV, -torch.inf)
    seeds_B, positions_B = draws(6, seed)
    strided_BV = torch.cat((logits_BV, logits_BV), dim=1)[:, :vocab_size]
    assert searched(strided_BV, seeds_B, positions_B) == plain(logits_BV, seeds_B, positions_B)


@pytest.mark.parametrize("lead", [35.0, 40.8, 50.0, 1e20])
def test_one_token_far_above_the_others(lead: float) -> None:
    """A lead near the largest noise, about 40.9, and beyond it."""
    logits_BV = normal(8, 5000, 2).float()
    logits_BV[:, 4999] += lead
    assert searched(logits_BV, *draws(8)) == plain(logits_BV, *draws(8)) == [4999] * 8


@pytest.mark.parametrize("behind", [0.0, 1e-15, 1e-12, 1e-10])
@pytest.mark.parametrize("vocab_size", [4096, 4133])
def test_a_rival_at_the_bound_is_not_lost(vocab_size: int, behind: float) -> None:
    """All tokens end up equal, but for the first ones, which are just below or equal. The first id
    of the best wins.
    """
    seeds_B, positions_B = draws(16)
    logits_BV = 1.0 - gumbel_noise(seeds_B, positions_B, vocab_size)
    for first in (0, 2000, vocab_size - 1):
        logits_BV[:, :first] -= behind
        found = searched(logits_BV, seeds_B, positions_B)
        assert found == plain(logits_BV, seeds_B, positions_B)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("count", [1, 2, 4000, REAL])
def test_logits_that_are_not_finite(value: float, count: int) -> None:
    """The first NaN wins, then the first inf; a row of -inf gives token 0. Other rows are not
    affected.
    """
    seeds_B, positions_B = draws(8)
    for first in {0, 7, REAL - count}:
        logits_BV = normal(8, REAL, 3).float()
        logits_BV[1, first : first + count] = value
        expected = plain(logits_BV, seeds_B, positions_B)
        assert searched(logits_BV, seeds_B, positions_B) == expected
        assert noisy_argmax(logits_BV, seeds_B, positions_B).tolist() == expected
        if value != -torch.inf:
            assert expected[1] == first
    nothing_BV = torch.full((8, REAL), -torch.inf)
    assert noisy_argmax(nothing_BV, seeds_B, positions_B).tolist() == [0] * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "temperature, top_p, top_k", [(1.0, 1.0, 0), (0.6, 1.0, 0), (0.9, 0.95, 0), (1.3, 1.0, 50)]
)
def test_samples_are_those_of_the_whole_noise(
    dtype: torch.dtype, temperature: float, top_p: float, top_k: int
) -> None:
    """Token and both log-probabilities."""
    logits_BV = normal(8, REAL, 4, 3.0).to(dtype)
    seeds_B, positions_B = draws(8)
    noise_BV = gumbel_noise(seeds_B, positions_B, REAL)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    rows = (logits_BV, seeds_B, positions_B, params)
    expected = sample(*rows, noise_BV=noise_BV)
    wide = logits_BV.to(torch.promote_types(dtype, torch.float32))
    scaled = wide if temperature == 1.0 and top_p == 1.0 else wide / temperature
    allowed_BV = cut_logits(scaled, top_p, top_k)
    assert expected.token_ids_B.tolist() == plain(allowed_BV, seeds_B, positions_B)
    found = sample(*rows)
    assert torch.equal(found.token_ids_B, expected.token_ids_B)
    assert torch.equal(found.logprobs_B, expected.logprobs_B)
    assert torch.equal(found.policy_logprobs_B, expected.policy_logprobs_B)


def test_noise_does_not_depend_on_the_size_of_the_vocabulary_or_the_batch() -> None:
    """Seeds at the ends of their range; columns of several chunks, alone or among other ids."""
    seeds_B = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    positions_B = torch.tensor([0, 131_071, 7, 0, 5])
    whole_BV = gumbel_noise(seeds_B, positions_B, 40_001)
    for vocab_size in (1, 24, 63, 64, 65, 1000, 40_000):
        found_BV = gumbel_noise(seeds_B, positions_B, vocab_size)
        assert torch.equal(found_BV, whole_BV[:, :vocab_size])
    order = torch.tensor([3, 0, 4, 1])  # other rows beside it
    found_BV = gumbel_noise(seeds_B[order], positions_B[order], 40_001)
    assert torch.equal(found_BV, whole_BV[order])
    some_C = torch.randperm(40_001, generator=torch.Generator().manual_seed(0))[:9000].sort().values
    keys_B = row_keys(seeds_B, positions_B)
    for ids_C in (some_C, some_C[:1], torch.tensor([64]), torch.tensor([63, 40_000])):
        assert torch.equal(noise.gumbel_of_ids(keys_B, ids_C), whole_BV[:, ids_C])
