"""Verification of a draft tree: which drafted tokens the target accepts, and which tokens are
committed.

It accepts tokens that equal the target's noise-keyed samples. The KV rows to keep are
`path_BS[:num_committed]`, in that order. The last committed token is the next root and has no KV
row yet.

Shapes: Q nodes, R = Q + 1 rows (row 0 is the root), S = depth + 1 (most tokens committed by a
pass). No shape depends on the data, and nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.speculation.tree import UNUSED, DraftTree, deepest_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The tokens that B requests commit.

    Example: drafts 7 and 8 follow the root and are accepted, then the target draws 5: num_accepted
    2, path [0 1 2], committed [7 8 5], num_committed 3. With stop token 8: num_accepted 2,
    num_committed 2, is_stopped.
    """

    num_accepted_B: Tensor  # int64, drafted tokens on the path, before stops and limits
    path_BS: Tensor  # int64, rows of the root and the accepted nodes, in order, then any
    # int64, accepted tokens, then the bonus token; UNUSED after num_committed
    committed_tokens_BS: Tensor
    num_committed_B: Tensor  # int64, tokens to append, in [1, S]: the accept length of this pass
    is_stopped_B: Tensor  # bool, whether the last committed token is a stop token


def verify_noise_keyed(
    tree: DraftTree,
    target_samples_BR: Tensor,
    *,
    stop_token_ids: Tensor,
    max_commit_B: Tensor,
) -> Verdict:
    """Accept the path of the tree that equals the target's samples.

    `target_samples_BR` is `sampling.sample` of the target's logits at every row, with the position
    of the token that follows the row. A node is accepted iff it and all its ancestors equal the
    sample at their parent's row. `stop_token_ids` is int64 on the same device and may be empty.
    `max_commit_B` >= 1 limits the tokens that each request may still commit.
    """
    sampled_BQ = tree.along(tree.parents_BQ + 1, target_samples_BR[:, :-1])
    is_match_BQ = sampled_BQ == tree.token_ids_BQ  # False for UNUSED: no sample is negative
    num_accepted_B, path_BS = deepest_path(tree, is_match_BQ)
    tokens_BS = tree.along(path_BS, target_samples_BR)
    # The first stop token and the limit cut what is committed.
    slots_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    num_committed_B = torch.minimum(num_accepted_B + 1, max_commit_B)
    is_stopped_B = torch.zeros_like(num_committed_B, dtype=torch.bool)
    if stop_token_ids.numel() > 0:  # else a captured pass has fewer nodes
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


def accepted_by_depth(num_accepted: Sequence[int], depth: int) -> list[int]:
    """Return how many requests accepted at least d drafted tokens, in element d - 1; selectors
    observe it.

    Example: accepted [2, 0, 1] by a strategy of depth 3 gives [2, 1, 0].
    """
    return [sum(accepted > index for accepted in num_accepted) for index in range(depth)]


def first_on_path(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Return [B, depth] bool: whether the accepted token at each depth is the first child of its
    parent.

    The learned drafter ranks children in node order.
    """
    is_sibling_BQQ = tree.parents_BQ.unsqueeze(2) == tree.parents_BQ.unsqueeze(1)
    is_first_BQ = ~is_sibling_BQQ.tril(-1).any(dim=2)
    is_first_BR = torch.nn.functional.pad(is_first_BQ, (1, 0))
    return is_first_BR.gather(1, verdict.path_BS)[:, 1:]
