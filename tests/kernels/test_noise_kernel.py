"""The Triton kernels of the noise against their torch forms."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE
from tlt_megatron.speculation import noise_kernel
from tlt_megatron.speculation.noise_kernel import noisy_argmax
from tlt_megatron.speculation.sampling import add_noise, gumbel_noise, sample
from tlt_megatron.types import SamplingParams

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0]
ULPS = 4 * 2.0**-52 * 40  # the logarithms of the two libraries may round apart; noise is below 40


def keys() -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions of 24 rows."""
    seeds_B = torch.tensor(SEEDS, device=DEVICE).repeat_interleave(4)
    positions_B = torch.tensor([0, 1, 777, 131_071], device=DEVICE).repeat(len(SEEDS))
    return seeds_B, positions_B


@pytest.mark.parametrize("vocab_size", [1, 48, 1024, 1025, 5000])
def test_noise_is_that_of_the_torch_form(vocab_size: int) -> None:
    seeds_B, positions_B = keys()
    expected_BV = gumbel_noise(seeds_B.cpu(), positions_B.cpu(), vocab_size)
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    zeros_BV = torch.zeros(expected_BV.shape, dtype=torch.float64, device=DEVICE)
    found_BV = noise_kernel.add_noise(zeros_BV, seeds_B, positions_B, one, one).cpu()
    assert found_BV.dtype == torch.float64
    torch.testing.assert_close(found_BV, expected_BV, rtol=0.0, atol=ULPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "vocab_size, spread", [(1, 3.0), (48, 3.0), (1025, 3.0), (3000, 0.0), (3000, 40.0)]
)
def test_tokens_are_those_of_the_torch_form(
    vocab_size: int, spread: float, dtype: torch.dtype
) -> None:
    seeds_B, positions_B = keys()
    generator = torch.Generator().manual_seed(vocab_size)
    logits_BV = spread * torch.randn(len(seeds_B), vocab_size, generator=generator, dtype=dtype)
    expected = sample(logits_BV, seeds_B.cpu(), positions_B.cpu(), SamplingParams())
    tokens_B = noisy_argmax(logits_BV.to(DEVICE), seeds_B, positions_B)
    assert tokens_B.tolist() == expected.token_ids_B.tolist()


def test_noise_is_made_for_few_tokens() -> None:
    """One number of each block of 64 ids tells which of them can have the winner."""
    seeds_B, positions_B = keys()
    generator = torch.Generator().manual_seed(0)
    logits_BV = 3.0 * torch.randn(len(seeds_B), 20_000, generator=generator)
    bounds_BK, guesses_BG = noise_kernel.bound_blocks(logits_BV.to(DEVICE), seeds_B, positions_B)
    is_open_BK = bounds_BK >= guesses_BG.amax(dim=1, keepdim=True)
    winners_B = gumbel_noise(seeds_B.cpu(), positions_B.cpu(), 20_000).add_(logits_BV).argmax(dim=1)
    assert is_open_BK.cpu().gather(1, (winners_B // 64).unsqueeze(1)).all()
    assert is_open_BK.double().mean() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_branches", [0, 3])
@pytest.mark.parametrize("has_ids", [False, True])
def test_noise_added_to_draft_logits_is_that_of_the_torch_form(
    has_ids: bool, dtype: torch.dtype, num_branches: int
) -> None:
    """And so are the candidates that a tree takes; `has_ids`: the columns are some ids of a larger
    vocabulary.
    """
    seeds_B, positions_B = keys()
    shape = (len(seeds_B), num_branches, 1025) if num_branches else (len(seeds_B), 1025)
    generator = torch.Generator().manual_seed(num_branches)
    logits = (3.0 * torch.randn(shape, generator=generator)).to(dtype)
    logits[..., 7] = -torch.inf
    scale = torch.tensor(0.7, dtype=torch.float64)
    factor_B = torch.linspace(0.0, 1.3, len(seeds_B), dtype=torch.float64)
    ids_V = torch.arange(1025) * 47 if has_ids else None
    expected = add_noise(logits, seeds_B.cpu(), positions_B.cpu(), scale, factor_B, ids_V)
    on_device = (None if v is None else v.to(DEVICE) for v in (scale, factor_B, ids_V))
    found = noise_kernel.add_noise(logits.to(DEVICE), seeds_B, positions_B, *on_device).cpu()
    assert found.dtype == expected.dtype == torch.promote_types(dtype, torch.float32)
    ulps = 4 * torch.finfo(found.dtype).eps * 40
    torch.testing.assert_close(found, expected, rtol=0.0, atol=ulps)
    assert found.topk(4).indices.equal(expected.topk(4).indices)


def test_tokens_outside_the_allowed_set_are_never_drawn() -> None:
    seeds_B, positions_B = keys()
    logits_BV = torch.full((len(seeds_B), 3000), -torch.inf)
    logits_BV[:, [5, 1500, 2999]] = 0.0
    tokens_B = noisy_argmax(logits_BV.to(DEVICE), seeds_B, positions_B)
    assert set(tokens_B.tolist()) == {5, 1500, 2999}


def test_rows_of_a_strided_view_are_read_as_they_lie() -> None:
    seeds_B, positions_B = keys()
    wide_BV = torch.randn(2 * len(seeds_B), 100, generator=torch.Generator().manual_seed(0))
    tokens_B = noisy_argmax(wide_BV[::2].to(DEVICE), seeds_B, positions_B)
    assert torch.equal(
        tokens_B, noisy_argmax(wide_BV[::2].clone().to(DEVICE), seeds_B, positions_B)
    )
