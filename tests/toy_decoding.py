"""A toy language model and drafts for it, for the tests of speculation.

The state of a sequence is a hash of its tokens, and the logits are a row of a random table: as hard
to guess as a real model, and a drafter is another table.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_megatron.speculation.sampling import gumbel_noise, sample
from tlt_megatron.speculation.tree import DraftTree, TreeGrower
from tlt_megatron.speculation.verify import Verdict, verify_noise_keyed
from tlt_megatron.types import SamplingParams

NUM_STATES = 97


def next_states(states: Tensor, token_ids: Tensor) -> Tensor:
    """The state after one more token."""
    return (states * 31 + token_ids * 7 + 1) % NUM_STATES


def random_table(vocab_size: int, seed: int, sharpness: float = 3.0) -> Tensor:
    """[states, V] float64 logits."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_STATES, vocab_size)
    return sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)


def draw(
    table: Tensor, states: Tensor, seeds: Tensor, positions: Tensor, how: SamplingParams
) -> Tensor:
    """The noise-keyed sample at every state; all arguments have one shape."""
    sampled = sample(table[states.reshape(-1)], seeds.reshape(-1), positions.reshape(-1), how)
    return sampled.token_ids_B.view(states.shape)


def grow_draft(
    draft_table: Tensor,
    states_B: Tensor,
    grower: TreeGrower,
    how: SamplingParams,
    noise_BDV: Tensor | None = None,
    *,
    noise_keys: tuple[Tensor, Tensor] | None = None,
    ids_C: Tensor | None = None,
) -> DraftTree:
    """A tree by a drafter that knows nothing but its own table and the states it was led through.
    It drafts `ids_C`.
    """
    rows: dict[str, Tensor] = {"states": states_B.unsqueeze(1)}
    logits = draft_table if ids_C is None else draft_table[:, ids_C]

    def expand(token_ids_BK: Tensor, parents_BK: Tensor) -> Tensor:
        rows["states"] = next_states(rows["states"].gather(1, parents_BK), token_ids_BK)
        return logits[rows["states"]]

    return grower.grow(
        logits[states_B],
        expand,
        how,
        noise_keys=noise_keys or (states_B, states_B),
        noise_BDV=noise_BDV,
        ids_V=ids_C,
    )


def verify(
    tree: DraftTree,
    samples_BR: Tensor,
    stops: Sequence[int] = (),
    limits_B: Tensor | None = None,
) -> Verdict:
    """The verdict; without `limits_B` a commit has no limit."""
    return verify_noise_keyed(
        tree,
        samples_BR,
        stop_token_ids=torch.tensor(stops, dtype=torch.int64),
        max_commit_B=torch.full((len(samples_BR),), 99) if limits_B is None else limits_B,
    )


def noise_of_depths(
    seeds_B: Tensor, positions_B: Tensor, num_steps: int, vocab_size: int
) -> Tensor:
    """[B, num_steps + 1, V]: the noise of the next positions."""
    num_rows = num_steps + 1
    positions_BD = positions_B.unsqueeze(1) + torch.arange(num_rows)
    seeds_BD = seeds_B.unsqueeze(1).expand(-1, num_rows)
    noise = gumbel_noise(seeds_BD.reshape(-1), positions_BD.reshape(-1), vocab_size)
    return noise.view(-1, num_rows, vocab_size)


def row_states(tree: DraftTree, states_B: Tensor) -> Tensor:
    """[B, R]: the state behind every row of the verify pass, computed along the parents as a target
    would.
    """
    states = [states_B]
    tokens_BQ = tree.token_ids_BQ.clamp(min=0)
    for node in range(tokens_BQ.shape[1]):
        stacked_BR = torch.stack(states, dim=1)
        parent_states_B = stacked_BR.gather(1, tree.parents_BQ[:, node : node + 1] + 1).squeeze(1)
        states.append(next_states(parent_states_B, tokens_BQ[:, node]))
    return torch.stack(states, dim=1)


def random_tree(generator: random.Random, batch_size: int, num_nodes: int, vocab: int) -> DraftTree:
    """Any parents, tokens that repeat among siblings, and unused nodes."""
    parents = [[generator.randrange(-1, q) for q in range(num_nodes)] for _ in range(batch_size)]
    depths = [[0] * num_nodes for _ in range(batch_size)]
    for row, own in enumerate(parents):
        for node, parent in enumerate(own):
            depths[row][node] = 1 + (depths[row][parent] if parent >= 0 else 0)
    tokens = [[generator.randrange(-1, vocab) for _ in range(num_nodes)] for _ in range(batch_size)]
    return DraftTree(
        token_ids_BQ=torch.tensor(tokens),
        parents_BQ=torch.tensor(parents),
        depths_BQ=torch.tensor(depths),
        depth=max(map(max, depths)),
    )
