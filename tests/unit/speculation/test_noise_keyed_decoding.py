"""The headline: with noise-keyed verification, speculative output is plain output, token for token.

It holds for any learned drafter and for whatever an n-gram index retrieves.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.toy_decoding import (
    NUM_STATES,
    Retrieve,
    Sampling,
    Verify,
    decode_plain,
    decode_speculative,
    draw,
    random_table,
)
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.speculation.ngram import NgramIndex
from tlt_megatron.speculation.tree import UNUSED, DraftTree
from tlt_megatron.speculation.verify import Verdict, verify_noise_keyed

VOCAB = 24
STOPS = (3, 17)
TARGET = random_table(VOCAB, seed=0)
DRAFTERS = {
    "good": TARGET + random_table(VOCAB, seed=1, sharpness=0.7),
    "random": random_table(VOCAB, seed=2),
    "always_right": TARGET,
    "always_wrong": -TARGET,
    "broken": torch.full((NUM_STATES, VOCAB), torch.nan),
    "stuck": torch.zeros(NUM_STATES, VOCAB),
}
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.6, top_p=0.9),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.0, top_k=4),
    Sampling(temperature=0.6, top_p=0.95, top_k=9),
)
LEARNED = [SpeculationStrategy.parse(t) for t in ("4_1_4", "1_3_3", "3_2_6", "6_4_16", "2_3_12")]
RETRIEVED = [SpeculationStrategy.parse(t) for t in ("ngram_1", "ngram_7")]


def by_noise(how: Sampling, stops: tuple[int, ...] = STOPS) -> Verify:
    def verify(
        tree: DraftTree,
        states_BR: torch.Tensor,
        seeds_B: torch.Tensor,
        positions_B: torch.Tensor,
        left_B: torch.Tensor,
    ) -> Verdict:
        positions_BR = positions_B.unsqueeze(1) + tree.row_depths_BR
        seeds_BR = seeds_B.unsqueeze(1).expand_as(positions_BR)
        samples_BR = draw(TARGET, states_BR, seeds_BR, positions_BR, how)
        return verify_noise_keyed(
            tree, samples_BR, stop_token_ids=torch.tensor(stops), max_commit_B=left_B
        )

    return verify


def retriever(kind: str, futures: list[list[int]], generator: random.Random) -> Retrieve:
    """Answers as an index might. `futures` are the responses that will come out."""
    index = NgramIndex(sizes=(3, 2, 1))
    texts, lengths = {}, {}

    def from_index(requests: list[int], so_far: list[list[int]], num_tokens: int) -> torch.Tensor:
        for request in requests:
            if request not in texts:
                texts[request], lengths[request] = index.start(str(request % 2), [0]), 0
        new = [tokens[lengths[r] :] for r, tokens in zip(requests, so_far, strict=True)]
        index.append([texts[r] for r in requests], new)
        lengths.update(zip(requests, map(len, so_far), strict=True))
        return index.propose([texts[r] for r in requests], num_tokens)[0]

    def from_the_future(
        requests: list[int], so_far: list[list[int]], num_tokens: int
    ) -> torch.Tensor:
        rows = []
        for request, tokens in zip(requests, so_far, strict=True):
            row = futures[request][len(tokens) : len(tokens) + num_tokens]
            if kind == "always_wrong":
                row = [(token + 1) % VOCAB for token in row]
            if kind == "short":
                row = row[: generator.randrange(num_tokens + 1)]
            if kind == "random":
                row = [generator.randrange(VOCAB) for _ in row]
            rows.append(row + [UNUSED] * (num_tokens - len(row)))
        return torch.tensor(rows)

    return from_index if kind == "index" else from_the_future


@pytest.mark.parametrize("how", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    ("drafter", "retrieved"),
    zip(
        DRAFTERS,
        ("index", "always_right", "always_wrong", "short", "random", "index"),
        strict=True,
    ),
)
def test_speculative_tokens_equal_plain_tokens(drafter: str, retrieved: str, how: Sampling) -> None:
    """The strategy changes at every step, and requests leave the batch as they end."""
    generator = random.Random(drafter)  # a string: the same numbers in every process
    seeds = [generator.randrange(-(2**63), 2**63) for _ in range(6)]
    limits = [generator.randrange(1, 25) for _ in seeds]
    plain = [decode_plain(TARGET, s, how, n, STOPS) for s, n in zip(seeds, limits, strict=True)]
    for strategies in (LEARNED, LEARNED + RETRIEVED):
        plan = [generator.choice(strategies) for _ in range(25)]
        responses, accept_lengths = decode_speculative(
            *(DRAFTERS[drafter], seeds, how, limits, by_noise(how), plan.__getitem__),
            retrieve=retriever(retrieved, plain, generator),
        )
        assert responses == plain
        if drafter == "broken" and strategies is LEARNED:  # its chains propose token 0 alone
            num_accepted = sum(accept_lengths) - len(accept_lengths)
            assert num_accepted <= sum(response.count(0) for response in responses)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("strategy", LEARNED, ids=str)
def test_drafter_equal_to_the_target_is_always_accepted(
    strategy: SpeculationStrategy, temperature: float
) -> None:
    how, limits = Sampling(temperature=temperature), [20, 17]
    responses, accept_lengths = decode_speculative(
        TARGET, [5, 6], how, limits, by_noise(how), lambda _: strategy
    )
    per_step = strategy.num_steps + 1
    assert len(accept_lengths) == sum(-(-len(tokens) // per_step) for tokens in responses)


def test_tokens_that_are_retrieved_rightly_are_all_accepted() -> None:
    how, limits, seeds = Sampling(), [24, 18], [5, 6]
    plain = [decode_plain(TARGET, s, how, n) for s, n in zip(seeds, limits, strict=True)]
    strategy = SpeculationStrategy.parse("ngram_5")
    responses, accept_lengths = decode_speculative(
        *(-TARGET, seeds, how, limits, by_noise(how, ()), lambda _: strategy),
        retrieve=retriever("always_right", plain, random.Random(0)),
    )
    assert responses == plain
    assert accept_lengths == [6] * 7
