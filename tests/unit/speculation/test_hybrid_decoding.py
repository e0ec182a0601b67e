"""Speculative output is plain output whatever an index retrieves, alone or on learned trees."""

from __future__ import annotations

import random

import pytest
import torch

from tests.toy_decoding import (
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
from tlt_megatron.speculation.tree import UNUSED, DraftTree, Ranking
from tlt_megatron.speculation.verify import Verdict, verify_noise_keyed

VOCAB = 24
STOPS = (3, 17)
TARGET = random_table(VOCAB, seed=0)
DRAFT = TARGET + random_table(VOCAB, seed=1, sharpness=0.7)
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.6, top_p=0.9),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_k=4),
)
STRATEGIES = [
    SpeculationStrategy.parse(text)
    for text in ("ngram_1", "ngram_7", "4_1_4+ngram_6", "3_2_6+ngram_2", "6_4_16+ngram_8", "2_3_12")
]


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
    """Something that answers as an index might. `futures` are the responses that will come out."""
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
@pytest.mark.parametrize("kind", ["index", "always_right", "always_wrong", "short", "random"])
def test_tokens_equal_plain_tokens_whatever_is_retrieved(kind: str, how: Sampling) -> None:
    """The strategy changes at every step, learned, retrieved or both; requests leave the batch as they end."""
    generator = random.Random(kind)  # a string: the same numbers in every process
    seeds = [generator.randrange(-(2**63), 2**63) for _ in range(6)]
    limits = [generator.randrange(1, 30) for _ in seeds]
    plain = [decode_plain(TARGET, s, how, n, STOPS) for s, n in zip(seeds, limits, strict=True)]
    plan = [(generator.choice(STRATEGIES), generator.choice(list(Ranking))) for _ in range(30)]
    responses, _ = decode_speculative(
        *(DRAFT, seeds, how, limits, by_noise(how), lambda step: plan[step]),
        retrieve=retriever(kind, plain, generator),
    )
    assert responses == plain


@pytest.mark.parametrize("text", ["ngram_5", "2_1_2+ngram_5", "3_4_12+ngram_5"])
@pytest.mark.parametrize("draft", ["good", "always_wrong"])
def test_what_is_retrieved_rightly_is_accepted_to_its_end(text: str, draft: str) -> None:
    """Whether the learned tree holds all of it, some of it or none."""
    how, limits, seeds = Sampling(), [24, 18], [5, 6]
    plain = [decode_plain(TARGET, s, how, n) for s, n in zip(seeds, limits, strict=True)]
    strategy = SpeculationStrategy.parse(text)
    responses, accept_lengths = decode_speculative(
        *(DRAFT if draft == "good" else -TARGET, seeds, how, limits, by_noise(how, ())),
        lambda _: (strategy, Ranking.NOISE),
        retrieve=retriever("always_right", plain, random.Random(0)),
    )
    assert responses == plain
    assert accept_lengths == [6] * 7


@pytest.mark.parametrize("text", ["4_1_4", "3_2_6"])
def test_what_is_retrieved_wrongly_costs_no_accepted_token(text: str) -> None:
    how, limits, seeds = Sampling(), [30] * 8, list(range(8))
    plain = [decode_plain(TARGET, s, how, 30) for s in seeds]
    accept_lengths = []
    for suffix in ("", "+ngram_4"):
        strategy = SpeculationStrategy.parse(text + suffix)
        _, lengths = decode_speculative(
            *(DRAFT, seeds, how, limits, by_noise(how, ())),
            lambda _, strategy=strategy: (strategy, Ranking.NOISE),
            retrieve=retriever("always_wrong", plain, random.Random(0)),
        )
        accept_lengths.append(lengths)
    assert accept_lengths[0] == accept_lengths[1]
    assert sum(accept_lengths[0]) > 1.5 * len(accept_lengths[0])
