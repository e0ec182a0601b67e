"""Verification keeps the target's distribution: chi-square tests of three tokens in a row.

The seeds are fixed, so a pass stays a pass; at fresh seeds each test would fail by chance once in 10,000 runs.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.toy_decoding import (
    Sampling,
    draw,
    grow_draft,
    next_states,
    noise_of_depths,
    random_table,
    row_states,
)
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.speculation.sampling import cut_logits
from tlt_megatron.speculation.tree import TreeGrower, chain_tree
from tlt_megatron.speculation.verify import verify_noise_keyed

VOCAB, LENGTH, BATCH = 5, 3, 20_000
TARGET = random_table(VOCAB, seed=0, sharpness=1.0)
DRAFT = TARGET + random_table(VOCAB, seed=1, sharpness=0.8)
SAMPLINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=0.6, top_p=0.9),
)


def probs(table: Tensor, how: Sampling) -> Tensor:
    """[states, V] after temperature and cut."""
    return cut_logits(table / how.temperature, how.top_p, how.top_k).softmax(-1)


def expected_counts(how: Sampling) -> Tensor:
    """[V^3] counts of the first three tokens, by the chain rule."""
    target = probs(TARGET, how)
    states, weights = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        weights = (weights.unsqueeze(1) * target[states]).view(-1)
        states = next_states(states.unsqueeze(1), torch.arange(VOCAB)).view(-1)
    return weights * BATCH


def assert_distribution(tokens_BT: Tensor, how: Sampling) -> None:
    cells_B = (tokens_BT * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    observed, expected = torch.bincount(cells_B, minlength=VOCAB**LENGTH), expected_counts(how)
    assert int(observed[expected == 0].sum()) == 0
    is_rare = expected < 8  # pooled into one cell, where the chi-square approximation would be poor
    observed = torch.cat([observed[~is_rare], observed[is_rare].sum(0, keepdim=True)]).double()
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum(0, keepdim=True)])
    is_there = expected > 0
    chi_square = float(((observed - expected) ** 2 / expected)[is_there].sum())
    freedom = int(is_there.sum()) - 1
    spread = 2.0 / (
        9.0 * freedom
    )  # Wilson and Hilferty 1931; 3.72 is the 1 - 1e-4 quantile of the normal
    limit = freedom * (1.0 - spread + 3.72 * math.sqrt(spread)) ** 3
    assert chi_square < limit, (
        f"chi-square {chi_square:.1f} of {freedom} degrees, limit {limit:.1f}"
    )


def decode(strategy: SpeculationStrategy, how: Sampling) -> Tensor:
    """[BATCH, LENGTH]: every request steps until the slowest has LENGTH tokens."""
    seeds_B = torch.arange(BATCH) * 1_000_003
    positions_B = torch.zeros(BATCH, dtype=torch.int64)
    states_B = torch.zeros(BATCH, dtype=torch.int64)
    num_slots = strategy.depth + 1
    buffer = torch.zeros(BATCH, LENGTH * num_slots + num_slots, dtype=torch.int64)
    for _ in range(LENGTH):
        if strategy.is_learned:
            noise_BDV = noise_of_depths(seeds_B, positions_B, strategy.num_steps, VOCAB)
            tree = grow_draft(DRAFT, states_B, TreeGrower(strategy), how, noise_BDV)
        else:
            found_BN = (states_B.unsqueeze(1) + torch.arange(strategy.depth) * 2) % VOCAB
            tree = chain_tree(found_BN)
        positions_BR = positions_B.unsqueeze(1) + tree.row_depths_BR
        seeds_BR = seeds_B.unsqueeze(1).expand_as(positions_BR)
        samples_BR = draw(TARGET, row_states(tree, states_B), seeds_BR, positions_BR, how)
        verdict = verify_noise_keyed(tree, samples_BR)
        for slot in range(num_slots):
            is_new_B = verdict.num_committed_B > slot
            token_B = verdict.committed_tokens_BS[:, slot].clamp(min=0)
            at_B1 = (positions_B + slot).unsqueeze(1)
            old_B = buffer.gather(1, at_B1).squeeze(1)
            buffer.scatter_(1, at_B1, torch.where(is_new_B, token_B, old_B).unsqueeze(1))
            states_B = torch.where(is_new_B, next_states(states_B, token_B), states_B)
        positions_B = positions_B + verdict.num_committed_B
    return buffer[:, :LENGTH]


@pytest.mark.parametrize("how", SAMPLINGS, ids=str)
@pytest.mark.parametrize("text", ["2_2_5", "ngram_2"])
def test_verification_keeps_the_target_distribution(text: str, how: Sampling) -> None:
    assert_distribution(decode(SpeculationStrategy.parse(text), how), how)
