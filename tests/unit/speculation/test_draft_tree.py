"""Tree growth and ancestor masks against slow definitions."""

from __future__ import annotations

import random

import pytest
import torch

from tests.toy_decoding import (
    grow_draft,
    next_states,
    noise_of_depths,
    random_table,
    random_tree,
)
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.speculation.tree import (
    _DRAFT_ERROR,
    UNUSED,
    DraftTree,
    TreeGrower,
    chain_tree,
)
from tlt_megatron.types import SamplingParams

STRATEGIES = ("1_1_1", "4_1_4", "1_3_2", "3_2_6", "4_2_14", "5_3_11", "6_4_16")
Path = tuple[int, ...]


def grow_slowly(
    table: torch.Tensor,
    state: int,
    strategy: SpeculationStrategy,
    how: SamplingParams,
    noise_DV: torch.Tensor,
) -> set[Path]:
    """Paths of the kept nodes, by the definition."""

    def children(path: Path, score: float) -> list[tuple[float, Path]]:
        here = torch.tensor(state)
        for token in path:
            here = next_states(here, torch.tensor(token))
        keys = (table[here] + how.temperature * noise_DV[len(path)]) / _DRAFT_ERROR
        log_probs = keys.log_softmax(-1).tolist()
        best = sorted(range(len(log_probs)), key=lambda token: -log_probs[token])
        return [(score + log_probs[token], (*path, token)) for token in best[: strategy.topk]]

    beam: list[tuple[float, Path]] = [(0.0, ())]
    candidates: list[tuple[float, Path]] = []
    for _ in range(strategy.num_steps):
        found = [child for score, path in beam for child in children(path, score)]
        candidates += found
        beam = sorted(found, reverse=True)[: strategy.topk]
    kept = sorted(candidates, reverse=True)[: strategy.num_draft_tokens]
    return {path for _, path in kept}


def paths_of(tree: DraftTree, row: int) -> set[Path]:
    """Read the node paths of a request from the record, and check order, depths and uniqueness."""
    paths: list[Path] = []
    for node, token in enumerate(tree.token_ids_BQ[row].tolist()):
        parent = int(tree.parents_BQ[row, node])
        assert -1 <= parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert int(tree.depths_BQ[row, node]) == len(paths[-1])
    assert len(set(paths)) == len(paths)
    return set(paths)


@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_growth_equals_the_slow_definition(text: str, temperature: float) -> None:
    strategy, how = SpeculationStrategy.parse(text), SamplingParams(temperature=temperature)
    batch_size = 5
    table = random_table(23, seed=1)
    states_B, seeds_B = torch.arange(batch_size) * 11, torch.arange(batch_size) + 100
    noise_BDV = noise_of_depths(seeds_B, states_B + 3, strategy.num_steps, 23)
    grower = TreeGrower(strategy)
    tree = grow_draft(table, states_B, grower, how, noise_BDV)
    assert tree.token_ids_BQ.shape == (batch_size, strategy.num_draft_tokens)
    for row in range(batch_size):
        expected = grow_slowly(table, int(states_B[row]), strategy, how, noise_BDV[row])
        assert paths_of(tree, row) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tree_holds_all_ancestors_when_scores_tie(dtype: torch.dtype) -> None:
    """One token is certain at every depth, so a child's score equals its parent's."""
    table = torch.full((97, 9), -1e4, dtype=dtype)
    table[:, 4] = 0.0
    strategy = SpeculationStrategy.parse("6_3_7")
    noise_BDV = torch.zeros(2, 7, 9)
    tree = grow_draft(
        table, torch.tensor([0, 5]), TreeGrower(strategy), SamplingParams(), noise_BDV
    )
    for row in range(2):
        assert (4,) * 6 in paths_of(tree, row)


def test_tokens_outside_the_cut_are_unused() -> None:
    """top_k 2, loosened to 3: a fourth child is never there."""
    table = random_table(11, seed=5)
    strategy, states_B = SpeculationStrategy.parse("2_4_20"), torch.tensor([1, 2, 3])
    noise_BDV = noise_of_depths(states_B, states_B, 2, 11)
    tree = grow_draft(table, states_B, TreeGrower(strategy), SamplingParams(top_k=2), noise_BDV)
    at_root = tree.parents_BQ.eq(-1) & tree.token_ids_BQ.ne(UNUSED)
    assert at_root.sum(1).tolist() == [3, 3, 3]
    for row in range(3):
        allowed = set(table[states_B[row]].topk(3).indices.tolist())
        assert set(tree.token_ids_BQ[row][at_root[row]].tolist()) == allowed
    assert int((tree.token_ids_BQ != UNUSED).sum(1).max()) == 3 + 3 * 3


@pytest.mark.parametrize("text", STRATEGIES)
def test_few_ids_grow_the_tree_of_all_ids_with_the_others_masked(text: str) -> None:
    """`TreeGrower` makes the noise of these ids from the keys."""
    strategy, vocab_size = SpeculationStrategy.parse(text), 23
    table, ids_C = random_table(vocab_size, seed=1), torch.tensor([1, 4, 5, 11, 12, 17, 22])
    states_B = torch.arange(5) * 11
    seeds_B, positions_B = states_B + 100, states_B + 3
    noise_BDV = noise_of_depths(seeds_B, positions_B, strategy.num_steps, vocab_size)
    masked = torch.full_like(table, -torch.inf)
    masked[:, ids_C] = table[:, ids_C]
    grower, how = TreeGrower(strategy), SamplingParams(temperature=0.7)
    expected = grow_draft(masked, states_B, grower, how, noise_BDV)
    keys = seeds_B, positions_B
    tree = grow_draft(table, states_B, grower, how, noise_keys=keys, ids_C=ids_C)
    assert torch.equal(tree.token_ids_BQ, expected.token_ids_BQ)
    assert torch.equal(tree.parents_BQ, expected.parents_BQ)


def test_broken_drafter_gives_a_well_formed_tree() -> None:
    table = torch.full((97, 11), torch.nan)
    strategy, states_B = SpeculationStrategy.parse("4_3_9"), torch.tensor([1, 2])
    noise_BDV = noise_of_depths(states_B, states_B, 4, 11)
    tree = grow_draft(table, states_B, TreeGrower(strategy), SamplingParams(), noise_BDV)
    assert tree.token_ids_BQ.eq(UNUSED).all()
    assert (tree.parents_BQ < torch.arange(9)).all()


def test_ancestor_mask_equals_the_walk_along_parents() -> None:
    generator = random.Random(0)
    trees = [random_tree(generator, 3, generator.randrange(1, 14), 5) for _ in range(60)]
    for tree in (*trees, chain_tree(torch.tensor([[3, 1, 2], [4, 4, UNUSED]]))):
        mask_BRR = tree.ancestors_BRR
        for row, parents in enumerate(tree.parents_BQ.tolist()):
            for node in range(-1, len(parents)):
                ancestors, here = {node}, node
                while here != -1:
                    here = parents[here]
                    ancestors.add(here)
                seen = {r - 1 for r in mask_BRR[row, node + 1].nonzero().flatten().tolist()}
                assert seen == ancestors


def test_rows_of_the_verify_pass_start_with_the_root() -> None:
    chain = chain_tree(torch.tensor([[3, 1, UNUSED]]))
    assert chain.row_token_ids_BR(torch.tensor([8])).tolist() == [[8, 3, 1, 0]]
    assert chain.row_depths_BR.tolist() == [[0, 1, 2, 3]]
