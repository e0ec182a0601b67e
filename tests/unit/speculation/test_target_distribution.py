"""Both verifiers keep the target's distribution: chi-square tests of three tokens in a row.

The seeds are fixed, so a pass stays a pass; at fresh seeds each test would fail by chance once in 10,000 runs.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.rejection_sampling import verify_rejection
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
from tlt_megatron.speculation.graft import graft
from tlt_megatron.speculation.sampling import cut_logits
from tlt_megatron.speculation.tree import DraftTree, Ranking, TreeGrower, chain_tree
from tlt_megatron.speculation.verify import Verdict, verify_noise_keyed

VOCAB, LENGTH, BATCH = 5, 3, 20_000
TARGET = random_table(VOCAB, seed=0, sharpness=1.0)
DRAFT = TARGET + random_table(VOCAB, seed=1, sharpness=0.8)
DRAFT_STREAM = 1 << 40  # the drafts of rejection sampling are drawn with noise of their own
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


def decode(strategy: SpeculationStrategy, ranking: Ranking, how: Sampling, kind: str) -> Tensor:
    """[BATCH, LENGTH]: every request steps until the slowest has LENGTH tokens."""
    seeds_B = torch.arange(BATCH) * 1_000_003
    positions_B = torch.zeros(BATCH, dtype=torch.int64)
    states_B = torch.zeros(BATCH, dtype=torch.int64)
    num_slots = strategy.depth + 1
    buffer = torch.zeros(BATCH, LENGTH * num_slots + num_slots, dtype=torch.int64)
    grower = TreeGrower(strategy, ranking=ranking)
    plain = Sampling(temperature=how.temperature)  # what drafts are drawn from is not cut
    for _ in range(LENGTH):
        draft_seeds_B = seeds_B if kind == "noise_keyed" else seeds_B + DRAFT_STREAM
        noise_BDV = noise_of_depths(draft_seeds_B, positions_B, strategy.num_steps, VOCAB)
        tree = grow_draft(DRAFT, states_B, grower, plain, noise_BDV)
        if strategy.num_retrieved:
            found_N = torch.arange(strategy.num_retrieved) * 2
            tree = graft(tree, (states_B.unsqueeze(1) + found_N) % VOCAB)
        verdict = verify(kind, tree, row_states(tree, states_B), seeds_B, positions_B, how)
        for slot in range(num_slots):
            is_new_B = verdict.num_committed_B > slot
            token_B = verdict.committed_tokens_BS[:, slot].clamp(min=0)
            at_B1 = (positions_B + slot).unsqueeze(1)
            old_B = buffer.gather(1, at_B1).squeeze(1)
            buffer.scatter_(1, at_B1, torch.where(is_new_B, token_B, old_B).unsqueeze(1))
            states_B = torch.where(is_new_B, next_states(states_B, token_B), states_B)
        positions_B = positions_B + verdict.num_committed_B
    return buffer[:, :LENGTH]


def verify(
    kind: str,
    tree: DraftTree,
    states_BR: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    how: Sampling,
) -> Verdict:
    if kind == "noise_keyed":
        positions_BR = positions_B.unsqueeze(1) + tree.row_depths_BR
        seeds_BR = seeds_B.unsqueeze(1).expand_as(positions_BR)
        return verify_noise_keyed(tree, draw(TARGET, states_BR, seeds_BR, positions_BR, how))
    draft_probs = (DRAFT / how.temperature).softmax(-1)[states_BR] if kind == "drawn" else None
    return verify_rejection(
        tree, probs(TARGET, how)[states_BR], draft_probs, seeds_B=seeds_B, positions_B=positions_B
    )


@pytest.mark.parametrize("how", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    "kind, text, ranking",
    [
        ("noise_keyed", "2_2_5", Ranking.NOISE),
        ("drawn", "2_1_2", Ranking.NOISE),  # Leviathan's chain
        ("drawn", "2_2_6", Ranking.NOISE),  # all drawn siblings are kept
        ("chosen", "2_2_4", Ranking.PROBABILITY),  # EAGLE-2
        ("noise_keyed", "1_2_2+ngram_2", Ranking.NOISE),
        ("chosen", "1_2_2+ngram_2", Ranking.PROBABILITY),
    ],
)
def test_verification_keeps_the_target_distribution(
    kind: str, text: str, ranking: Ranking, how: Sampling
) -> None:
    strategy = SpeculationStrategy.parse(text)
    assert_distribution(decode(strategy, ranking, how, kind), how)


def test_rejection_refuses_to_take_retrieved_nodes_for_drawn_ones() -> None:
    tree = graft(chain_tree(torch.tensor([[1]]), torch.ones(1, 1)), torch.tensor([[2]]))
    probs_BRV = torch.full((1, 3, VOCAB), 1 / VOCAB)
    zeros_B = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_retrieved=1"):
        verify_rejection(tree, probs_BRV, probs_BRV, seeds_B=zeros_B, positions_B=zeros_B)


def test_rejection_accepts_every_draft_of_an_equal_distribution() -> None:
    strategy, how = SpeculationStrategy.parse("3_1_3"), Sampling()
    seeds_B, zeros_B = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    noise_BDV = noise_of_depths(seeds_B + DRAFT_STREAM, zeros_B, 3, VOCAB)
    tree = grow_draft(TARGET, zeros_B, TreeGrower(strategy), how, noise_BDV)
    probs_BRV = TARGET.softmax(-1)[row_states(tree, zeros_B)]
    verdict = verify_rejection(tree, probs_BRV, probs_BRV, seeds_B=seeds_B, positions_B=zeros_B)
    assert verdict.num_accepted_B.eq(3).all()
    assert torch.equal(verdict.committed_tokens_BS[:, :3], tree.token_ids_BQ)
    assert torch.equal(verdict.path_BS, torch.arange(4).expand(500, 4))


def test_rejection_accepts_the_overlap_of_both_distributions() -> None:
    """Leviathan et al. 2023: a single draft is accepted with probability sum(min(p, q)). 4 standard errors: 6e-5."""
    num_requests = 20_000
    strategy, zeros_B = (
        SpeculationStrategy.parse("1_1_1"),
        torch.zeros(num_requests, dtype=torch.int64),
    )
    seeds_B = torch.arange(num_requests)
    noise_BDV = noise_of_depths(seeds_B + DRAFT_STREAM, zeros_B, 1, VOCAB)
    tree = grow_draft(DRAFT, zeros_B, TreeGrower(strategy), Sampling(), noise_BDV)
    states_BR = row_states(tree, zeros_B)
    p_BRV, q_BRV = TARGET.softmax(-1)[states_BR], DRAFT.softmax(-1)[states_BR]
    verdict = verify_rejection(tree, p_BRV, q_BRV, seeds_B=seeds_B, positions_B=zeros_B)
    expected = float(torch.minimum(p_BRV[0, 0], q_BRV[0, 0]).sum())
    error = math.sqrt(expected * (1 - expected) / num_requests)
    assert float(verdict.num_accepted_B.float().mean()) == pytest.approx(expected, abs=4 * error)
