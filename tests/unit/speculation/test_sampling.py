"""Sampling draws from the exact distribution, with noise that depends on (seed, position, token)
alone.

Statistical tests have fixed seeds; each would raise a false alarm with probability 1e-4 if its
seeds were drawn anew.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tlt_megatron.speculation.sampling import (
    MAX_KEPT,
    cut_logits,
    gumbel_noise,
    gumbel_of,
    kept_ids,
    kept_table,
    request_seed,
    sample,
)
from tlt_megatron.types import SamplingParams

ALARM = 1e-4
LOGITS = torch.tensor([2.0, 1.2, 1.2, 0.3, 0.0, -0.4, -1.0, -1.5, -1.5, -2.5, -3.0, -6.0])


def seeds(count: int) -> Tensor:
    return torch.tensor([request_seed(0, i // 8, i % 8) for i in range(count)])


def chi_square_p(counts_V: Tensor, probs_V: Tensor) -> float:
    """Upper tail probability of Pearson's statistic; cells with fewer than 5 expected are
    pooled.
    """
    assert counts_V[probs_V == 0].sum() == 0
    expected = probs_V.double() * counts_V.sum()
    small = expected < 5
    observed = torch.cat((counts_V[~small].double(), counts_V[small].sum().view(1).double()))
    expected = torch.cat((expected[~small], expected[small].sum().view(1)))
    is_used = expected > 0
    statistic = ((observed - expected)[is_used] ** 2 / expected[is_used]).sum()
    half_degrees = torch.tensor((int(is_used.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, statistic / 2))


def exact(temperature: float, top_p: float, top_k: int) -> Tensor:
    """The sampled distribution, written out by hand for the descending LOGITS."""
    probs = torch.softmax(LOGITS.double() / temperature, dim=0)
    if top_k:
        probs[top_k:] = 0
        probs /= probs.sum()
    total = 0.0
    for token, prob in enumerate(probs.tolist()):
        if total >= top_p:
            probs[token] = 0
        total += prob
    return probs / probs.sum()


CASES = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 1.0, 5), (1.0, 0.8, 0), (0.9, 0.9, 6), (1.0, 0.6, 3)]


@pytest.mark.parametrize("over", ["seeds", "positions"])
@pytest.mark.parametrize("temperature, top_p, top_k", CASES)
def test_sampled_tokens_follow_the_exact_distribution(
    temperature: float, top_p: float, top_k: int, over: str
) -> None:
    count = 20_000
    many, one = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    row_seeds, positions = (seeds(count), one + 3) if over == "seeds" else (one + 99, many)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    drawn = sample(LOGITS.expand(count, -1), row_seeds, positions, params)
    probs = exact(temperature, top_p, top_k)
    counts = torch.bincount(drawn.token_ids_B, minlength=len(LOGITS))
    assert chi_square_p(counts, probs) > ALARM
    wrong = torch.softmax(LOGITS.double() / (temperature * 1.2), dim=0) * (probs > 0)
    assert chi_square_p(counts, wrong / wrong.sum()) < ALARM  # the test can tell
    torch.testing.assert_close(
        drawn.logprobs_B, probs.log()[drawn.token_ids_B].float(), atol=1e-5, rtol=1e-5
    )
    policy = torch.log_softmax(LOGITS, dim=0)[drawn.token_ids_B]
    torch.testing.assert_close(drawn.policy_logprobs_B, policy, atol=1e-6, rtol=1e-6)


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 0.0]])
    greedy = SamplingParams(temperature=0.0)
    drawn = sample(logits, seeds(2), torch.zeros(2, dtype=torch.int64), greedy)
    assert drawn.token_ids_B.tolist() == [1, 0]
    assert drawn.logprobs_B.tolist() == [0.0, 0.0]
    torch.testing.assert_close(drawn.policy_logprobs_B, logits.log_softmax(1).max(1).values)


def test_ties_at_the_cut_rank_by_token_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0]])

    def kept(top_p: float, top_k: int) -> list[int]:
        return cut_logits(logits, top_p, top_k)[0].isfinite().nonzero().flatten().tolist()

    assert kept(1.0, 3) == [0, 1, 4]
    assert kept(1.0, 4) == [0, 1, 2, 4]
    assert kept(0.3, 0) == [1]
    assert kept(0.75, 0) == [0, 1, 4]
    assert kept(0.9, 3) == [0, 1, 4]
    assert kept(0.01, 0) == [1]
    assert kept(1.0, 9) == [0, 1, 2, 3, 4]


def test_noise_is_a_race_of_splitmix64_hashes() -> None:
    """Recomputed with Python's integers over three blocks, which pins the stream across versions
    and devices.
    """
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(z: int) -> int:
        z &= mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def exponential(bits: int) -> float:
        return -math.log(((bits >> 12) + 0.5) / 2**52)

    seed, position = request_seed(3, 4, 5), 11
    key = mix(seed + position * golden)
    expected = []
    for token in range(150):
        block_bits = mix(key - token // 64 * golden)
        race = exponential(block_bits) / 64
        if block_bits % 64 != token % 64:
            race += exponential(mix(key + (token + 1) * golden))
        expected.append(-math.log(race))
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 150)[0]
    expected_V = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(noise, expected_V, atol=1e-14, rtol=1e-14)
    on_cuda = gumbel_of(torch.tensor([key - (key >> 63 << 64)]), torch.arange(150))[0]
    torch.testing.assert_close(on_cuda, expected_V, atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("step", ["token", "position", "sample", "draw", "seed"])
def test_neighbouring_noise_is_independent(step: str) -> None:
    """Joint 16 x 16 table of each value and its neighbour along one argument."""
    count, vocab = 400, 128
    number = torch.arange(count)

    def noise_of(shift: int) -> Tensor:
        moved = {name: shift * (name == step) for name in ("position", "sample", "draw", "seed")}
        keys = torch.tensor(
            [
                request_seed(5 + moved["seed"], 2 * (i // 2) + moved["draw"], i % 2 * 9 + moved["sample"])
                for i in range(count)
            ]
        )  # fmt: skip
        return gumbel_noise(keys, number % 3 * 7 + moved["position"], vocab)

    first, second = noise_of(0), noise_of(1)
    if step == "token":
        second = first.roll(-1, dims=1)
    cells = [(torch.exp(-torch.exp(-n)) * 16).long() for n in (first, second)]
    counts = torch.bincount((cells[0] * 16 + cells[1]).flatten(), minlength=256)
    assert chi_square_p(counts, torch.full((256,), 1 / 256)) > ALARM


def test_request_seeds_do_not_repeat() -> None:
    keys = {request_seed(s, d, i) for s in range(8) for d in range(200) for i in range(16)}
    assert len(keys) == 8 * 200 * 16
    assert all(-(1 << 63) <= key < 1 << 63 for key in keys)


def test_kept_ids_are_those_of_the_cut_unless_they_are_too_many() -> None:
    cut_BV = torch.full((3, 2 * MAX_KEPT), -torch.inf)
    cut_BV[0, [7, 900]] = 1.0
    cut_BV[1, :MAX_KEPT] = 1.0
    cut_BV[2, : MAX_KEPT + 1] = 1.0
    kept = kept_ids(kept_table(cut_BV))
    assert [row.tolist() for row in kept] == [[7, 900], list(range(MAX_KEPT)), []]


# ---- the exponential race of a block of 64 token ids, and between blocks

NUM_ROWS, NUM_IDS = 4000, 160  # two whole blocks and a part of a third


@pytest.fixture(scope="module")
def uniform_BV() -> Tensor:
    """exp(-E) of each number of the race: uniform if E is Exp(1)."""
    noise_BV = gumbel_noise(seeds(NUM_ROWS), torch.arange(NUM_ROWS) % 23, NUM_IDS)
    return torch.exp(-torch.exp(-noise_BV))


def test_every_number_is_exp_1(uniform_BV: Tensor) -> None:
    """Each place of a block is tested alone, and so are numbers below 1 / 64, where most of the
    smallest of a block are.
    """
    cells = (uniform_BV * 8).long()
    even = torch.full((8,), 1 / 8)
    for token in range(NUM_IDS):
        assert chi_square_p(torch.bincount(cells[:, token], minlength=8), even) > ALARM / NUM_IDS
    race = -uniform_BV.log().flatten()
    small = race[race < 1 / 64]
    assert abs(len(small) / len(race) - (1 - math.exp(-1 / 64))) < 6e-4
    counts = torch.bincount((small * 64 * 32).long().clamp(max=31), minlength=32)
    edges = torch.linspace(0, 1 / 64, 33, dtype=torch.float64)
    probs = (-edges).exp().diff().neg() / (1 - math.exp(-1 / 64))
    assert chi_square_p(counts, probs) > ALARM


def test_numbers_are_not_correlated(uniform_BV: Tensor) -> None:
    """All pairs of tokens, in one block or in two: their ranks, their E, and whether E is small.
    Each correlation is normal with deviation 1 / sqrt(NUM_ROWS).
    """
    for values in (uniform_BV, -uniform_BV.log(), (uniform_BV > 0.9).double()):
        correlations = torch.corrcoef(values.T)
        pairs = correlations[torch.triu_indices(NUM_IDS, NUM_IDS, 1).unbind()] * math.sqrt(NUM_ROWS)
        assert pairs.abs().max() < 6.0
        assert abs(float(pairs.square().mean()) - 1.0) < 0.05


def test_drawn_tokens_follow_the_softmax_over_several_blocks() -> None:
    """Some tokens of two blocks are likely, and the rest of the probability is spread over all."""
    count = 20_000
    logits_V = torch.randn(NUM_IDS, generator=torch.Generator().manual_seed(0)) * 1.5
    logits_V[[5, 6, 130]] += 3.0
    rows = logits_V.expand(count, -1), seeds(count), torch.zeros(count).long()
    drawn = sample(*rows, SamplingParams())
    counts = torch.bincount(drawn.token_ids_B, minlength=NUM_IDS)
    assert chi_square_p(counts, logits_V.softmax(0)) > ALARM
