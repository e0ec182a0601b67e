"""How many tokens are accepted if children are ranked by the noise of their position, and if by
their probability alone.

The drafter: 512 tokens, target logits 3 x normal, draft logits off by 0.7 x normal. Margins are
above 4 standard errors, so at fresh seeds a test fails by chance less than once in 10,000 runs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.toy_decoding import (
    draw,
    grow_draft,
    next_states,
    noise_of_depths,
    random_table,
    row_states,
    verify,
)
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.speculation.tree import DraftTree, TreeGrower
from tlt_megatron.speculation.verify import first_on_path
from tlt_megatron.types import SamplingParams

VOCAB = 512
TARGET = random_table(VOCAB, seed=0)
DRAFT = TARGET + random_table(VOCAB, seed=1, sharpness=0.7)


def accept_length(
    text: str,
    how: SamplingParams,
    *,
    drafts_by_noise: bool = True,
    drafter: Tensor = DRAFT,
    num_steps: int = 12,
    batch_size: int = 64,
) -> float:
    """Mean tokens per verify pass over num_steps x batch_size passes."""
    strategy = SpeculationStrategy.parse(text)
    grower = TreeGrower(strategy)
    seeds_B = torch.arange(batch_size)
    positions_B, states_B = torch.zeros_like(seeds_B), seeds_B.clone() % 90
    for _ in range(num_steps):
        noise_BDV = noise_of_depths(seeds_B, positions_B, strategy.num_steps, VOCAB)
        if not drafts_by_noise:
            noise_BDV = torch.zeros_like(noise_BDV)
        tree = grow_draft(drafter, states_B, grower, how, noise_BDV)
        positions_BR = positions_B.unsqueeze(1) + tree.row_depths_BR
        seeds_BR = seeds_B.unsqueeze(1).expand_as(positions_BR)
        samples_BR = draw(TARGET, row_states(tree, states_B), seeds_BR, positions_BR, how)
        verdict = verify(tree, samples_BR)
        for slot in range(strategy.num_steps + 1):
            token_B = verdict.committed_tokens_BS[:, slot]
            states_B = torch.where(
                verdict.num_committed_B > slot, next_states(states_B, token_B), states_B
            )
        positions_B = positions_B + verdict.num_committed_B
    return float(positions_B.sum()) / (num_steps * batch_size)


@pytest.mark.parametrize("text", ["4_1_4", "4_4_12"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_noise_ranked_trees_accept_more_tokens(text: str, temperature: float) -> None:
    how = SamplingParams(temperature=temperature)
    assert accept_length(text, how) > 1.2 * accept_length(text, how, drafts_by_noise=False)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("text", ["1_3_3", "4_1_4", "6_1_6"])
def test_all_drafts_of_a_drafter_equal_to_the_target_are_accepted(
    text: str, temperature: float
) -> None:
    how = SamplingParams(temperature=temperature)
    depth = SpeculationStrategy.parse(text).depth
    assert accept_length(text, how, drafter=TARGET, num_steps=3, batch_size=8) == depth + 1


def test_cut_target_is_followed_by_a_cut_drafter() -> None:
    """The noise lifts tokens that a cut target cannot draw; a drafter that ranked them would lose a
    third.
    """
    assert accept_length("4_1_4", SamplingParams(top_k=8)) > 2.1


def test_first_children_of_a_small_tree_by_hand() -> None:
    """root -> {7 -> {8, 5}, 9}. Row 0 takes 7 then 5, its second child; row 1 takes 9, the second
    child of the root.
    """
    parents = torch.tensor([[-1, -1, 0, 0]]).expand(2, -1)
    tree = DraftTree(
        token_ids_BQ=torch.tensor([[7, 9, 8, 5]]).expand(2, -1),
        parents_BQ=parents,
        depths_BQ=torch.tensor([[1, 1, 2, 2]]).expand(2, -1),
        depth=2,
    )
    verdict = verify(tree, torch.tensor([[7, 5, 1, 1, 1], [9, 1, 1, 1, 1]]))
    assert verdict.num_accepted_B.tolist() == [2, 1]
    assert first_on_path(tree, verdict).tolist() == [[True, False], [False, False]]
