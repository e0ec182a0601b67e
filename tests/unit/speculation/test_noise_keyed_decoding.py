"""The headline: with noise-keyed verification, speculative output is plain output, token for token."""

from __future__ import annotations

import random

import pytest
import torch

from tests.toy_decoding import (
    NUM_STATES,
    Sampling,
    Verify,
    decode_plain,
    decode_speculative,
    draw,
    random_table,
)
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.speculation.tree import DraftTree, Ranking
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
STRATEGIES = [SpeculationStrategy.parse(t) for t in ("4_1_4", "1_3_3", "3_2_6", "6_4_16", "2_3_12")]


def by_noise(how: Sampling) -> Verify:
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
        stops = torch.tensor(STOPS)
        return verify_noise_keyed(tree, samples_BR, stop_token_ids=stops, max_commit_B=left_B)

    return verify


@pytest.mark.parametrize("how", SAMPLINGS, ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculative_tokens_equal_plain_tokens(drafter: str, how: Sampling) -> None:
    """Any drafter, the strategy and the ranking changing at every step, requests leaving the batch as they end."""
    generator = random.Random(drafter)  # a string: the same numbers in every process
    seeds = [generator.randrange(-(2**63), 2**63) for _ in range(6)]
    limits = [generator.randrange(1, 25) for _ in seeds]
    plan = [(generator.choice(STRATEGIES), generator.choice(list(Ranking))) for _ in range(25)]
    responses, accept_lengths = decode_speculative(
        DRAFTERS[drafter], seeds, how, limits, by_noise(how), lambda step: plan[step]
    )
    plain = [decode_plain(TARGET, s, how, n, STOPS) for s, n in zip(seeds, limits, strict=True)]
    assert responses == plain
    if drafter == "broken":  # its chains propose token 0, so no other is accepted
        num_accepted = sum(accept_lengths) - len(accept_lengths)
        assert num_accepted <= sum(response.count(0) for response in responses)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_drafter_equal_to_the_target_is_always_accepted(
    strategy: SpeculationStrategy, temperature: float
) -> None:
    """A small tau says that the drafter can be trusted, so that the budget goes into the depth."""
    how, limits = Sampling(temperature=temperature), [20, 17]
    tau_D = torch.full((strategy.num_steps,), 0.05, dtype=torch.float64)
    responses, accept_lengths = decode_speculative(
        TARGET, [5, 6], how, limits, by_noise(how), lambda _: (strategy, Ranking.NOISE), tau_D
    )
    per_step = strategy.num_steps + 1
    assert len(accept_lengths) == sum(-(-len(tokens) // per_step) for tokens in responses)
