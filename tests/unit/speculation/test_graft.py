"""Retrieved tokens on learned trees against a construction row by row, and what verification makes of them."""

from __future__ import annotations

import random

import pytest
import torch

from tests.toy_decoding import random_tree
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.speculation.calibration import AcceptanceCalibrator, calibration_counts
from tlt_megatron.speculation.graft import graft, retrieved_chain
from tlt_megatron.speculation.tree import (
    ROOT,
    UNUSED,
    DraftTree,
    TreeGrower,
    chain_tree,
)
from tlt_megatron.speculation.verify import verify_noise_keyed


def learned_tree(
    generator: random.Random, batch_size: int, num_nodes: int, vocab: int
) -> DraftTree:
    """Any shape, unused nodes among the others; siblings differ, as those of a grown tree do."""
    tree = random_tree(generator, batch_size, num_nodes, vocab)
    for row in range(batch_size):
        seen = set()
        for node, parent in enumerate(tree.parents_BQ[row].tolist()):
            child = (parent, int(tree.token_ids_BQ[row, node]))
            if child in seen:
                tree.token_ids_BQ[row, node] = UNUSED
            seen.add(child)
    return tree


def random_proposals(
    generator: random.Random, batch_size: int, num_retrieved: int, vocab: int
) -> torch.Tensor:
    """Of any length, UNUSED behind."""
    rows = []
    for _ in range(batch_size):
        length = generator.randrange(num_retrieved + 1)
        row = [generator.randrange(vocab) for _ in range(length)]
        rows.append(row + [UNUSED] * (num_retrieved - length))
    return torch.tensor(rows)


def graft_slowly(
    tokens: list[int], parents: list[int], retrieved: list[int]
) -> list[tuple[int, int]]:
    """(token, parent) of every node, by walking down from the root as long as a child agrees."""
    nodes = list(zip(tokens, parents, strict=True))
    here, is_known = ROOT, True
    for token in retrieved:
        children = [n for n, node in enumerate(nodes) if node == (token, here) and token != UNUSED]
        is_known = is_known and bool(children)
        nodes.append((UNUSED if is_known else token, here))
        here = children[0] if is_known else len(nodes) - 1
    return nodes


def test_grafted_tree_equals_the_construction_row_by_row() -> None:
    """Trees shallower and deeper than the proposal, and proposals wholly known, partly known and unknown."""
    generator, agreed = random.Random(3), set()
    for _ in range(120):
        num_nodes, num_retrieved = generator.randrange(1, 13), generator.randrange(1, 8)
        tree = learned_tree(generator, 4, num_nodes, vocab=2)
        found_BN = random_proposals(generator, 4, num_retrieved, vocab=2)
        grafted = graft(tree, found_BN)
        assert (grafted.num_steps, grafted.num_retrieved) == (tree.num_steps, num_retrieved)
        assert grafted.num_learned == num_nodes
        assert int(grafted.depths_BQ.max()) <= grafted.depth
        for row in range(4):
            tokens, parents = grafted.token_ids_BQ[row].tolist(), grafted.parents_BQ[row].tolist()
            retrieved = found_BN[row].tolist()
            expected = graft_slowly(tokens[:num_nodes], tree.parents_BQ[row].tolist(), retrieved)
            assert list(zip(tokens, parents, strict=True)) == expected
            assert tokens[:num_nodes] == tree.token_ids_BQ[row].tolist()
            for node, parent in enumerate(parents):
                depth_above = int(grafted.depths_BQ[row, parent]) if parent != ROOT else 0
                assert int(grafted.depths_BQ[row, node]) == depth_above + 1
            new = tokens[num_nodes:]
            agreed.add(sum(token != UNUSED for token in retrieved) - sum(t != UNUSED for t in new))
    assert agreed >= {0, 1, 2, 3}


def test_graft_of_the_example_by_hand() -> None:
    tree = DraftTree(
        token_ids_BQ=torch.tensor([[7, 9, 8]]),
        parents_BQ=torch.tensor([[-1, -1, 0]]),
        depths_BQ=torch.tensor([[1, 1, 2]]),
        scores_BQ=torch.tensor([[0.5, 0.3, 0.2]]),
        num_steps=2,
    )
    grafted = graft(tree, torch.tensor([[7, 8, 5, 6]]))
    assert grafted.token_ids_BQ.tolist() == [[7, 9, 8, UNUSED, UNUSED, 5, 6]]
    assert grafted.parents_BQ.tolist() == [[-1, -1, 0, -1, 0, 2, 5]]
    assert grafted.depths_BQ.tolist() == [[1, 1, 2, 1, 2, 3, 4]]
    assert grafted.scores_BQ[0, 3:].tolist() == [0.0] * 4
    assert grafted.depth == 4
    assert not grafted.is_chain


def test_chain_and_the_same_tree_not_called_a_chain_are_grafted_alike() -> None:
    chain = chain_tree(torch.tensor([[3, 1, 2], [3, 4, UNUSED]]), torch.ones(2, 3))
    general = DraftTree(
        token_ids_BQ=chain.token_ids_BQ,
        parents_BQ=chain.parents_BQ,
        depths_BQ=chain.depths_BQ,
        scores_BQ=chain.scores_BQ,
        num_steps=3,
    )
    found_BN = torch.tensor([[3, 1, 5, 6], [3, 4, 0, 0]])
    one, other = graft(chain, found_BN), graft(general, found_BN)
    assert torch.equal(one.parents_BQ, other.parents_BQ)
    assert torch.equal(one.token_ids_BQ, other.token_ids_BQ)
    assert one.parents_BQ[1, 3:].tolist() == [-1, 0, 1, 5]


def test_retrieved_chain_reads_token_0_where_it_is_padded_and_accepts_nothing_there() -> None:
    chain = retrieved_chain(torch.tensor([[3, 0, UNUSED], [UNUSED] * 3]))
    assert (chain.num_steps, chain.num_retrieved, chain.depth) == (0, 3, 3)
    assert chain.row_token_ids_BR(torch.tensor([8, 9])).tolist() == [[8, 3, 0, 0], [9, 0, 0, 0]]
    samples_BR = torch.tensor([[3, 0, 0, 0], [0, 0, 0, 0]])
    verdict = verify_noise_keyed(chain, samples_BR)
    assert verdict.num_accepted_B.tolist() == [2, 0]
    assert verdict.num_committed_B.tolist() == [3, 1]


def test_padding_with_any_token_is_accepted_only_where_the_target_draws_it() -> None:
    """So a caller that pads with token 0 stays exact: what is committed is what the target drew."""
    samples_BR = torch.tensor([[3, 0, 0, 5]])
    padded = verify_noise_keyed(retrieved_chain(torch.tensor([[3, 0, 0]])), samples_BR)
    assert padded.committed_tokens_BS.tolist() == [[3, 0, 0, 5]]
    other = verify_noise_keyed(retrieved_chain(torch.tensor([[3, 7, 7]])), samples_BR)
    assert other.committed_tokens_BS.tolist() == [[3, 0, UNUSED, UNUSED]]


def test_calibration_of_a_grafted_tree_is_that_of_its_learned_part() -> None:
    generator, seeded, num_reached = random.Random(5), torch.Generator().manual_seed(1), 0.0
    for _ in range(25):
        tree = learned_tree(generator, 6, generator.randrange(1, 9), vocab=2)
        tree.scores_BQ.uniform_(0.1, 1.0, generator=seeded)
        num_learned, num_retrieved = tree.num_learned, generator.randrange(1, 6)
        grafted = graft(tree, random_proposals(generator, 6, num_retrieved, vocab=2))
        samples_BR = torch.randint(2, (6, num_learned + num_retrieved + 1), generator=seeded)
        alone = calibration_counts(tree, verify_noise_keyed(tree, samples_BR[:, : num_learned + 1]))
        joined = calibration_counts(grafted, verify_noise_keyed(grafted, samples_BR))
        torch.testing.assert_close(joined, alone)
        num_reached += float(alone[2].sum())
    assert num_reached > 100


def test_retrieved_tokens_alone_leave_the_calibration_as_it_was() -> None:
    chain = retrieved_chain(torch.tensor([[3, 1]]))
    counts = calibration_counts(chain, verify_noise_keyed(chain, torch.tensor([[3, 1, 1]])))
    assert counts.shape == (3, 0)
    calibrator = AcceptanceCalibrator(2)
    calibrator.observe(counts.tolist())
    assert calibrator.tau() == AcceptanceCalibrator(2).tau()


def test_growing_a_tree_without_a_drafter_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy=ngram_4 grows no tree"):
        TreeGrower(SpeculationStrategy.parse("ngram_4"))
