"""Draft trees from retrieved tokens: a chain of them alone, or grafted onto a learned tree.

Called by the engines with what `ngram.NgramIndex` proposes. One thing to know: retrieved nodes are neither ranked nor
dropped, so shapes are fixed by the strategy, and a proposal that is short or that the learned tree holds already leaves
UNUSED nodes. Verification never accepts those; were a token to stand there instead, it would accept it exactly where the
target draws it, so how the rest is padded is a matter of cost alone.

Shapes: Q learned nodes, N retrieved ones, S = depth + 1 rows of a path.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tlt_megatron.speculation.tree import ROOT, UNUSED, DraftTree, chain_tree, deepest_path


def retrieved_chain(token_ids_BN: Tensor) -> DraftTree:
    """Retrieved tokens alone, UNUSED behind the end of each row's proposal."""
    chain = chain_tree(token_ids_BN, torch.zeros(token_ids_BN.shape, device=token_ids_BN.device))
    return dataclasses.replace(chain, num_steps=0, num_retrieved=token_ids_BN.shape[1])


def graft(
    tree: DraftTree, token_ids_BN: Tensor, *, ancestors_BRR: Tensor | None = None
) -> DraftTree:
    """A learned tree with N more nodes: retrieved tokens follow its nodes where they agree, and the rest hangs below the
    deepest node that does.

    Example: root -> {7 -> {8}, 9} and retrieved [7 8 5 6]: 7 and 8 are there, 5 becomes a child of 8, and 6 of 5. The
    nodes of 7 and 8 among the new ones are UNUSED. `ancestors_BRR` is `ancestor_mask(tree)` where the caller has it.
    """
    num_learned, num_retrieved = tree.token_ids_BQ.shape[1], token_ids_BN.shape[1]
    # Nodes deeper than the proposal are compared with its last token: where the path goes on there matters to nobody.
    wanted_BQ = token_ids_BN.gather(1, (tree.depths_BQ - 1).clamp(max=num_retrieved - 1))
    agrees_BQ = (tree.token_ids_BQ == wanted_BQ) & (tree.token_ids_BQ != UNUSED)
    num_agreed_B, path_BS = deepest_path(tree, agrees_BQ, ancestors_BRR)
    num_agreed_B1 = num_agreed_B.unsqueeze(1)

    steps_N = torch.arange(num_retrieved, device=token_ids_BN.device)
    # The node of the path that retrieved token n would be a child of; true up to the first that the path lacks.
    above_BN = torch.nn.functional.pad(path_BS, (0, max(num_retrieved - path_BS.shape[1], 0)))
    above_BN = above_BN[:, :num_retrieved] + ROOT
    parents_BN = torch.where(steps_N <= num_agreed_B1, above_BN, num_learned - 1 + steps_N)
    tokens_BN = torch.where(steps_N < num_agreed_B1, UNUSED, token_ids_BN)
    return DraftTree(
        token_ids_BQ=torch.cat([tree.token_ids_BQ, tokens_BN], dim=1),
        parents_BQ=torch.cat([tree.parents_BQ, parents_BN], dim=1),
        depths_BQ=torch.cat([tree.depths_BQ, (steps_N + 1).expand_as(token_ids_BN)], dim=1),
        scores_BQ=torch.nn.functional.pad(tree.scores_BQ, (0, num_retrieved)),
        num_steps=tree.num_steps,
        num_retrieved=num_retrieved,
    )
