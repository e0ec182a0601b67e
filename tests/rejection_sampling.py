"""Verification by rejection sampling, the method from the literature that `verify_noise_keyed` is compared with.

No engine uses it, because rollouts would not repeat.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_megatron.speculation.sampling import gumbel_noise
from tlt_megatron.speculation.tree import UNUSED, DraftTree, path_of_rows
from tlt_megatron.speculation.verify import Verdict, _commit

# Added to a request's seed for the accept tests, so that they are independent of token noise.
_ACCEPT_STREAM = 0x5DEECE66D1CE4E5B


def verify_rejection(
    tree: DraftTree,
    target_probs_BRV: Tensor,
    draft_probs_BRV: Tensor | None,
    *,
    seeds_B: Tensor,
    positions_B: Tensor,
    stop_token_ids: Tensor | None = None,
    max_commit_B: Tensor | None = None,
) -> Verdict:
    """Verify by rejection sampling (Leviathan et al. 2023) over the branches of a tree (SpecInfer, Miao et al. 2024).

    Children of the current node are tried in row order. x is accepted with probability min(1, p(x) / q(x)); otherwise p
    becomes the residual norm(max(p - q, 0)) and x is removed from q. Committed tokens follow the target's distribution, but
    differ from plain decoding. `target_probs_BRV` is tempered and cut. `draft_probs_BRV` is the distribution from which the
    children of a row were drawn without replacement, in row order, with none dropped. None means that the children were
    chosen (EAGLE-2) or retrieved, so q(x) = 1. `positions_B` is the position of the token after the root. The drafts must
    not use the noise of (`seeds_B`, `positions_B`), because the bonus token does.
    """
    if draft_probs_BRV is not None and tree.num_retrieved:
        raise ValueError(
            f"num_retrieved={tree.num_retrieved}: retrieved nodes are not drawn, so draft_probs_BRV must be None"
        )
    batch_size, num_rows, vocab_size = target_probs_BRV.shape
    num_nodes = num_rows - 1
    depths_BR = tree.row_depths_BR
    uniform_BQ = _uniforms(seeds_B, positions_B, num_nodes)
    rows_B = torch.arange(batch_size, device=seeds_B.device)
    current_B = torch.zeros_like(rows_B)
    target_BV = target_probs_BRV[:, 0]
    draft_BV = draft_probs_BRV[:, 0] if draft_probs_BRV is not None else None
    on_path_BR = torch.zeros_like(depths_BR, dtype=torch.bool)
    on_path_BR[:, 0] = True
    for node in range(num_nodes):
        token_B = tree.token_ids_BQ[:, node]
        is_tried_B = (tree.parents_BQ[:, node] + 1 == current_B) & (token_B != UNUSED)
        token_B1 = token_B.clamp(min=0).unsqueeze(1)
        target_B = target_BV.gather(1, token_B1).squeeze(1)
        draft_B = draft_BV.gather(1, token_B1).squeeze(1) if draft_BV is not None else 1.0
        is_accepted_B = is_tried_B & (uniform_BQ[:, node] * draft_B < target_B)
        is_rejected_B = is_tried_B & ~is_accepted_B
        residual_BV = _residual(target_BV, draft_BV, token_B1)
        target_BV = torch.where(is_rejected_B.unsqueeze(1), residual_BV, target_BV)
        target_BV = torch.where(
            is_accepted_B.unsqueeze(1), target_probs_BRV[:, node + 1], target_BV
        )
        if draft_BV is not None and draft_probs_BRV is not None:
            without_BV = _normalized(draft_BV.scatter(1, token_B1, 0.0))
            draft_BV = torch.where(is_rejected_B.unsqueeze(1), without_BV, draft_BV)
            draft_BV = torch.where(
                is_accepted_B.unsqueeze(1), draft_probs_BRV[:, node + 1], draft_BV
            )
        current_B = torch.where(is_accepted_B, node + 1, current_B)
        on_path_BR[:, node + 1] = is_accepted_B
    num_accepted_B = on_path_BR.sum(dim=1) - 1
    path_BS = path_of_rows(on_path_BR, depths_BR, tree.depth + 1)
    noise_BV = gumbel_noise(seeds_B, positions_B + num_accepted_B, vocab_size)
    bonus_B = (target_BV.double().log() + noise_BV).argmax(dim=1)
    # The token at slot s is the node at path[s + 1]; the bonus token follows the last node.
    row_tokens_BR = tree.row_token_ids_BR(bonus_B)
    next_BS = torch.cat([path_BS[:, 1:], torch.zeros_like(path_BS[:, :1])], dim=1)
    tokens_BS = row_tokens_BR.gather(1, next_BS)
    return _commit(num_accepted_B, path_BS, tokens_BS, stop_token_ids, max_commit_B)


def _residual(target_BV: Tensor, draft_BV: Tensor | None, token_B1: Tensor) -> Tensor:
    if draft_BV is None:
        return _normalized(target_BV.scatter(1, token_B1, 0.0))
    return _normalized((target_BV - draft_BV).clamp(min=0.0))


def _normalized(weights_BV: Tensor) -> Tensor:
    return weights_BV / weights_BV.sum(dim=1, keepdim=True).clamp(
        min=torch.finfo(weights_BV.dtype).tiny
    )


def _uniforms(seeds_B: Tensor, positions_B: Tensor, num_draws: int) -> Tensor:
    """Return [B, num_draws] in (0, 1), a function of (seed, position, draw) alone."""
    noise = gumbel_noise(seeds_B + _ACCEPT_STREAM, positions_B, num_draws)
    return (-(-noise).exp()).exp()
