"""Draft trees from retrieved tokens: a chain alone, or a chain grafted onto a learned tree.

The engines call it with the proposals of `ngram.NgramIndex`. Retrieved nodes are neither ranked nor dropped, so the strategy
fixes all shapes. A short proposal, or tokens that the learned tree holds already, leave UNUSED nodes. Verification never
accepts those. Padding affects only cost: any other token would be accepted exactly where the target draws it.

Shapes: Q learned nodes, N retrieved nodes, S = depth + 1 rows of a path.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tlt_megatron.speculation.tree import ROOT, UNUSED, DraftTree, chain_tree, deepest_path


def retrieved_chain(token_ids_BN: Tensor) -> DraftTree:
    """Return a chain of retrieved tokens. UNUSED tokens follow the end of a row's proposal."""
    chain = chain_tree(token_ids_BN, torch.zeros(token_ids_BN.shape, device=token_ids_BN.device))
    return dataclasses.replace(chain, num_steps=0, num_retrieved=token_ids_BN.shape[1])


def graft(tree: DraftTree, token_ids_BN: Tensor) -> DraftTree:
    """Add N retrieved nodes to a learned tree, below the deepest path that agrees with the retrieved tokens.

    Example: root -> {7 -> {8}, 9} and retrieved [7 8 5 6]: 7 and 8 exist, so 5 becomes a child of 8, and 6 of 5. The new
    nodes for 7 and 8 are UNUSED.
    """
    num_learned, num_retrieved = tree.token_ids_BQ.shape[1], token_ids_BN.shape[1]
    # Nodes deeper than the proposal are compared with its last token; a match there changes nothing.
    wanted_BQ = token_ids_BN.gather(1, (tree.depths_BQ - 1).clamp(max=num_retrieved - 1))
    agrees_BQ = (tree.token_ids_BQ == wanted_BQ) & (tree.token_ids_BQ != UNUSED)
    num_agreed_B, path_BS = deepest_path(tree, agrees_BQ)
    num_agreed_B1 = num_agreed_B.unsqueeze(1)

    steps_N = torch.arange(num_retrieved, device=token_ids_BN.device)
    # The path's node that is the parent of retrieved token n; valid up to the first token that the path lacks.
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
