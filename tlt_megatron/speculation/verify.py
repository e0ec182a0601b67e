"""Verification of a draft tree: which drafted tokens the target accepts, and which tokens are committed.

The engines call `verify_noise_keyed`, which accepts tokens that equal the target's noise-keyed samples. `verify_rejection` is
the method from the literature, for comparison only. No engine or setting calls it, because rollouts would not repeat. The KV
rows to keep are `path_BS[:num_committed]`, in that order. The last committed token is the next root and has no KV row yet.

Shapes: Q nodes, R = Q + 1 rows (row 0 is the root), S = depth + 1 (most tokens committed by a pass). No shape
depends on the data, and nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.speculation.sampling import gumbel_noise
from tlt_megatron.speculation.tree import UNUSED, DraftTree, deepest_path, path_of_rows

# Added to a request's seed for the accept tests of `verify_rejection`, so that they are independent of token noise.
_ACCEPT_STREAM = 0x5DEECE66D1CE4E5B


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The tokens that B requests commit.

    Example: drafts 7 and 8 follow the root and are accepted, then the target draws 5: num_accepted 2, path [0 1 2],
    committed [7 8 5], num_committed 3. With stop token 8: num_accepted 2, num_committed 2, is_stopped.
    """

    num_accepted_B: Tensor  # int64, drafted tokens on the path, before stops and limits
    path_BS: Tensor  # int64, rows of the root and the accepted nodes, in order; padded with 0
    committed_tokens_BS: (
        Tensor  # int64, accepted tokens, then the bonus token; UNUSED after num_committed
    )
    num_committed_B: Tensor  # int64, tokens to append, in [1, S]: the accept length of this pass
    is_stopped_B: Tensor  # bool, whether the last committed token is a stop token


def verify_noise_keyed(
    tree: DraftTree,
    target_samples_BR: Tensor,
    *,
    ancestors_BRR: Tensor | None = None,
    stop_token_ids: Tensor | None = None,
    max_commit_B: Tensor | None = None,
) -> Verdict:
    """Accept the path of the tree that equals the target's samples.

    `target_samples_BR` is `sampling.sample` of the target's logits at every row, with the position of the token that
    follows the row. A node is accepted iff it and all its ancestors equal the sample at their parent's row. `ancestors_BRR`
    is `ancestor_mask(tree)` if the engine has it already. `stop_token_ids` is int64 on the same device. `max_commit_B` >= 1
    limits the tokens that each request may still commit.
    """
    sampled_BQ = target_samples_BR.gather(1, tree.parents_BQ + 1)
    is_match_BQ = sampled_BQ == tree.token_ids_BQ  # False for UNUSED: no sample is negative
    num_accepted_B, path_BS = deepest_path(tree, is_match_BQ, ancestors_BRR)
    tokens_BS = target_samples_BR.gather(1, path_BS)
    return _commit(num_accepted_B, path_BS, tokens_BS, stop_token_ids, max_commit_B)


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


def accepted_by_depth(num_accepted: Sequence[int], depth: int) -> list[int]:
    """Return how many requests accepted at least d drafted tokens, in element d - 1; selectors observe it.

    Example: accepted [2, 0, 1] by a strategy of depth 3 gives [2, 1, 0].
    """
    counts = [0] * depth
    for accepted in num_accepted:
        for index in range(accepted):
            counts[index] += 1
    return counts


def _commit(
    num_accepted_B: Tensor,
    path_BS: Tensor,
    tokens_BS: Tensor,
    stop_token_ids: Tensor | None,
    max_commit_B: Tensor | None,
) -> Verdict:
    """Cut the accepted tokens and the bonus token after the first stop token and at the limit."""
    slots_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    num_committed_B = num_accepted_B + 1
    if max_commit_B is not None:
        num_committed_B = torch.minimum(num_committed_B, max_commit_B)
    is_stopped_B = torch.zeros_like(num_committed_B, dtype=torch.bool)
    if stop_token_ids is not None and stop_token_ids.numel() > 0:
        is_stop_BS = (tokens_BS.unsqueeze(2) == stop_token_ids).any(dim=2)
        first_stop_B = torch.where(is_stop_BS, slots_S, tokens_BS.shape[1]).amin(dim=1)
        is_stopped_B = first_stop_B < num_committed_B
        num_committed_B = torch.minimum(num_committed_B, first_stop_B + 1)
    is_committed_BS = slots_S < num_committed_B.unsqueeze(1)
    return Verdict(
        num_accepted_B=num_accepted_B,
        path_BS=path_BS,
        committed_tokens_BS=torch.where(is_committed_BS, tokens_BS, UNUSED),
        num_committed_B=num_committed_B,
        is_stopped_B=is_stopped_B,
    )


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
