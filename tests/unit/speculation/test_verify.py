"""Noise-keyed verification against a slow walk, and what cuts a commit short."""

from __future__ import annotations

import random

import pytest
import torch

from tests.toy_decoding import random_tree, verify
from tlt_megatron.speculation.tree import UNUSED, DraftTree, chain_tree
from tlt_megatron.speculation.verify import Verdict, accepted_by_depth


def walk(
    tree: DraftTree, row: int, samples: list[int], stops: set[int], limit: int
) -> tuple[int, list[int], list[int]]:
    """Accepted drafts, the rows of the path and the committed tokens of one request, by the
    definition.
    """
    tokens, parents = tree.token_ids_BQ[row].tolist(), tree.parents_BQ[row].tolist()

    def path_to(node: int) -> list[int] | None:
        """Rows from the root to the node, None if the target disagrees on the way."""
        if node == -1:
            return [0]
        above = path_to(parents[node])
        if above is None or tokens[node] == UNUSED or samples[parents[node] + 1] != tokens[node]:
            return None
        return [*above, node + 1]

    paths = [path for node in range(-1, len(tokens)) if (path := path_to(node)) is not None]
    best = max(paths, key=len)
    committed = []
    for place in best[:limit]:
        committed.append(samples[place])
        if samples[place] in stops:
            break
    return len(best) - 1, best, committed


def assert_is(verdict: Verdict, row: int, expected: tuple[int, list[int], list[int]]) -> None:
    num_accepted, path, committed = expected
    count = int(verdict.num_committed_B[row])
    assert int(verdict.num_accepted_B[row]) == num_accepted
    assert verdict.path_BS[row, : num_accepted + 1].tolist() == path
    assert verdict.committed_tokens_BS[row, :count].tolist() == committed
    assert verdict.committed_tokens_BS[row, count:].eq(UNUSED).all()


@pytest.mark.parametrize("is_chain", [False, True])
def test_verdict_equals_the_slow_walk(is_chain: bool) -> None:
    """Two or three different tokens, so that long paths, repeated siblings and early stops all
    occur.
    """
    generator, longest, num_stopped = random.Random(1), 0, 0
    for _ in range(150):
        vocab, batch_size = generator.randrange(2, 4), 4
        tree = random_tree(generator, batch_size, generator.randrange(1, 16), vocab)
        if is_chain:
            tree = chain_tree(tree.token_ids_BQ)
        num_rows = tree.num_rows
        samples = [[generator.randrange(vocab) for _ in range(num_rows)] for _ in range(batch_size)]
        stops = {0} if generator.random() < 0.3 else set()
        limits = [generator.randrange(1, 6) for _ in range(batch_size)]
        verdict = verify(tree, torch.tensor(samples), sorted(stops), torch.tensor(limits))
        for row in range(batch_size):
            expected = walk(tree, row, samples[row], stops, limits[row])
            assert_is(verdict, row, expected)
            assert bool(verdict.is_stopped_B[row]) == (expected[2][-1] in stops)
            longest = max(longest, expected[0])
            num_stopped += bool(verdict.is_stopped_B[row])
    assert longest >= 3
    assert num_stopped > 20


def test_accepted_by_depth_counts_requests() -> None:
    assert accepted_by_depth([2, 0, 1], 3) == [2, 1, 0]
    assert accepted_by_depth([], 2) == [0, 0]
