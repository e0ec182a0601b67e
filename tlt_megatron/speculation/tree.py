"""Draft trees: the record that drafters pass to the verify pass, and its growth from draft logits.

The engines grow trees with the learned drafter as the callable `Expand`. `chain_tree` makes the
same record of retrieved tokens. The strategy fixes every shape and nothing is read back from the
device, so a graph can capture growth. Shapes: Q nodes, R = Q + 1 rows of the verify pass (row 0 is
the root, the last committed token; node q is row q + 1), S = depth + 1 rows of a path, K nodes
expanded at once, D positions of noise.

Growth follows EAGLE-2 (Li et al. 2024, section 4): expand the K best nodes at each depth, then keep
the Q best of all candidates. EAGLE-2 scores a child by its probability; here it is draft logit /
temperature + noise. This is the noise with which the target will sample at that position. So a
score estimates that the target draws this token now, not on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.speculation.sampling import add_noise, cut_logits
from tlt_megatron.types import SamplingParams

ROOT = -1  # as a parent: the last committed token
UNUSED = -1  # as a token: a node that is never accepted

# The error of draft logits: a child's estimate is softmax((logits + temperature * noise) / error).
# If the error were Gumbel noise of this scale, the softmax would be the exact posterior.
_DRAFT_ERROR = 0.7
SCALE = 1.0 / _DRAFT_ERROR  # of draft logits

# Subtracted from a candidate's log score per depth, in float64. A child then never ties with its
# parent, so the best Q candidates always include their own ancestors.
_DEPTH_PENALTY = 1e-9


Expand = Callable[[Tensor, Tensor], Tensor]
"""(token_ids_BK, parents_BK) -> logits_BKV: draft logits after each token.

parents_BK index the K rows of the call before (all 0 in the first call: the root). Called
num_steps - 1 times.
"""


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens of B requests. Parents precede their children.

    Example: root -> {7 -> {8}, 9} is token_ids [7 9 8], parents [-1 -1 0], depths [1 1 2].
    """

    token_ids_BQ: Tensor  # int64, UNUSED where there is no node
    parents_BQ: Tensor  # int64 node index, or ROOT
    depths_BQ: Tensor  # int64, 1 below the root
    # The largest depth of a node; all trees of a strategy have the same.
    depth: int = field(kw_only=True)
    # Node q is the child of node q - 1, and row q + 1 has depth q + 1.
    is_chain: bool = field(default=False, kw_only=True)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, parents and depths."""
        return self.token_ids_BQ, self.parents_BQ, self.depths_BQ

    @property
    def num_rows(self) -> int:
        """Return R."""
        return self.token_ids_BQ.shape[1] + 1

    @cached_property
    def row_depths_BR(self) -> Tensor:
        """Return the depth of each verify row. A row's position is the root's position plus its
        depth.
        """
        if self.is_chain:
            rows_R = torch.arange(self.num_rows, device=self.depths_BQ.device)
            return rows_R.expand(len(self.depths_BQ), -1)
        return torch.nn.functional.pad(self.depths_BQ, (1, 0))

    @cached_property
    def ancestors_BRR(self) -> Tensor:
        """Return whether a row sees another: itself and its ancestors, root included. UNUSED nodes
        are treated like others.
        """
        batch_size, num_nodes = self.parents_BQ.shape
        num_rows, device = num_nodes + 1, self.parents_BQ.device
        if self.is_chain:
            ones_RR = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device)
            return ones_RR.tril().expand(batch_size, -1, -1)
        rows_R = torch.arange(num_rows, device=device)
        parent_rows_BR = torch.nn.functional.pad(self.parents_BQ + 1, (1, 0))
        reach_BRR = (parent_rows_BR.unsqueeze(2) == rows_R).float()
        reach_BRR += torch.eye(num_rows, device=device)
        # reach ^ n counts the paths of at most n edges up. Squaring doubles n, and counts stay
        # below 2 ^ (2 depth).
        for _ in range((self.depth - 1).bit_length()):
            reach_BRR = reach_BRR @ reach_BRR
        return reach_BRR > 0

    def along(self, rows_BS: Tensor, values_BR: Tensor) -> Tensor:
        """Return the values of these rows. A chain has no other order than that of its rows."""
        return values_BR if self.is_chain else values_BR.gather(1, rows_BS)

    def row_token_ids_BR(self, root_ids_B: Tensor) -> Tensor:
        """Return the verify pass's input: the root's token first. UNUSED nodes get token 0; their
        rows are never used.
        """
        return torch.cat([root_ids_B.unsqueeze(1), self.token_ids_BQ.clamp(min=0)], dim=1)


def chain_tree(token_ids_BQ: Tensor) -> DraftTree:
    """Return a tree with one branch. Trailing UNUSED tokens end it early."""
    num_nodes = token_ids_BQ.shape[1]
    rows_R = torch.arange(num_nodes + 1, device=token_ids_BQ.device)
    return DraftTree(
        token_ids_BQ=token_ids_BQ,
        parents_BQ=(rows_R[:-1] - 1).expand_as(token_ids_BQ),
        depths_BQ=rows_R[1:].expand_as(token_ids_BQ),
        depth=num_nodes,
        is_chain=True,
    )


def deepest_path(tree: DraftTree, is_match_BQ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the longest path from the root over matching nodes: its length [B] and its rows [B,
    S], root first.

    Rows after its end are any. Row s of a chain is s.
    """
    num_slots = tree.depth + 1
    if tree.is_chain:
        slots_S = torch.arange(num_slots, device=is_match_BQ.device)
        return is_match_BQ.cumprod(dim=1).sum(dim=1), slots_S.expand(len(is_match_BQ), -1)
    ancestors_BRR = tree.ancestors_BRR
    has_mismatch_BR = (ancestors_BRR[:, :, 1:] & ~is_match_BQ.unsqueeze(1)).any(dim=2)
    depths_BR = tree.row_depths_BR
    length_B, last_row_B = (depths_BR * ~has_mismatch_BR).max(dim=1)
    last_B1R = last_row_B.view(-1, 1, 1).expand(-1, 1, depths_BR.shape[1])
    on_path_BR = ancestors_BRR.gather(1, last_B1R).squeeze(1)
    rows_BR = torch.arange(depths_BR.shape[1], device=depths_BR.device).expand_as(depths_BR)
    slots_BR = torch.where(on_path_BR, depths_BR, num_slots)
    path = rows_BR.new_zeros(len(rows_BR), num_slots + 1).scatter_(1, slots_BR, rows_BR)
    return length_B, path[:, :num_slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    """Estimates the acceptance of every token as a child of a node, by depth."""

    scale: Tensor  # factor on the logits; 0-dim, so that float64 does not promote the logits
    params: SamplingParams  # the target's
    keys: tuple[Tensor, Tensor]  # seeds [B] and positions [B] of depth 0's noise
    offsets: tuple[Tensor, ...] | None  # by depth, [B, V] each: their noise, if it is there already
    ids_V: Tensor | None  # token ids of the columns, ascending; None: 0 to V - 1

    def best(self, logits: Tensor, depth: int, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and token ids of the `count` best children, [B, count] or [B, K,
        count].
        """
        values, columns = self._scores(logits, depth).log_softmax(-1).topk(count)
        return values, self._ids(columns)

    def likeliest(self, logits_BV: Tensor, depth: int) -> Tensor:
        """Return the token id of the best child, [B, 1]."""
        return self._ids(self._scores(logits_BV, depth).argmax(-1, keepdim=True))

    def _ids(self, columns: Tensor) -> Tensor:
        return columns if self.ids_V is None else self.ids_V[columns]

    def _scores(self, logits: Tensor, depth: int) -> Tensor:
        """Return logits * scale + offset in at least float32. `logits` is [B, V] or [B, K, V]."""
        if self.params.temperature == 0.0:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return logits * self.scale
        if self.params.is_cut:
            logits = self._cut(logits)
        if self.offsets is None:
            seeds_B, positions_B = self.keys
            factor = self.scale * self.params.temperature
            positions_B = positions_B + depth
            return add_noise(logits, seeds_B, positions_B, self.scale, factor, self.ids_V)
        offset = self.offsets[depth]
        if logits.dim() == 3:
            offset = offset.unsqueeze(1)
        return torch.addcmul(offset, logits, self.scale)

    def _cut(self, logits: Tensor) -> Tensor:
        """Drop tokens that the target's top-p and top-k most likely exclude, because noise could
        rank them high.

        The drafter knows the border only roughly, so its cut is half as strict.
        """
        params = self.params
        top_p, top_k = (1.0 + params.top_p) / 2, params.top_k + (params.top_k + 1) // 2
        flat = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(
            -1, logits.shape[-1]
        )
        cut = cut_logits(flat / params.temperature, top_p, top_k)
        return flat.masked_fill(cut == -torch.inf, -torch.inf).view_as(logits)


class TreeGrower:
    """Grows the learned part of a strategy's trees. Holds only constants."""

    def __init__(
        self, strategy: SpeculationStrategy, *, device: torch.device | str = "cpu"
    ) -> None:
        self.strategy = strategy
        steps, topk = strategy.num_steps, strategy.topk
        depths = torch.tensor([1] * topk + [d for d in range(2, steps + 1) for _ in range(topk**2)])
        self._depths_M = depths.to(device)
        self._penalty_M = (depths.double() * _DEPTH_PENALTY).to(device)
        self._nodes_Q = torch.arange(strategy.num_draft_tokens, device=device)
        # First candidate of each expanded depth, plus 1: index 0 of `node_of_BM` is the root.
        starts = [1] + [1 + topk + d * topk**2 for d in range(max(steps - 2, 0))]
        self._beam_starts_E1 = torch.tensor(starts, device=device).unsqueeze(1)
        self._scale = torch.full((), SCALE, dtype=torch.float64, device=device)

    def offsets(self, noise_BDV: Tensor, params: SamplingParams, dtype: torch.dtype) -> Tensor:
        """Return the addends of `SCALE` times the draft logits of this dtype: the noise of their
        depths.
        """
        noise_BDV = noise_BDV[:, : self.strategy.num_steps]
        wide = torch.promote_types(dtype, torch.float32)
        return (noise_BDV * (self._scale * params.temperature)).to(wide)

    def grow(
        self,
        root_logits_BV: Tensor,
        expand: Expand,
        params: SamplingParams,
        *,
        noise_keys: tuple[Tensor, Tensor],
        noise_BDV: Tensor | None = None,
        ids_V: Tensor | None = None,
    ) -> DraftTree:
        """Grow one tree per request.

        `root_logits_BV` are the draft logits after the root. `params` are those of the target.
        `noise_keys` are the seeds and positions [B] of depth 1. If the noise is there already,
        `noise_BDV[:, d]` is `gumbel_noise` of the position of depth d + 1; the row for the bonus
        token is not read. `ids_V` are the token ids of the columns of logits and `noise_BDV`; None:
        0 to V - 1.
        """
        offsets = None
        if noise_BDV is not None:
            offsets = self.offsets(noise_BDV, params, root_logits_BV.dtype).unbind(1)
        scoring = _Scoring(
            scale=self._scale, params=params, keys=noise_keys, offsets=offsets, ids_V=ids_V
        )
        if self.strategy.topk == 1:
            return self._grow_chain(root_logits_BV, expand, scoring)
        return self._grow_tree(root_logits_BV, expand, scoring)

    def _grow_chain(self, root_logits_BV: Tensor, expand: Expand, scoring: _Scoring) -> DraftTree:
        steps = self.strategy.num_steps
        logits_BV = root_logits_BV
        zeros_B1 = torch.zeros(logits_BV.shape[0], 1, dtype=torch.int64, device=logits_BV.device)
        tokens = []
        for depth in range(steps):
            token_B1 = scoring.likeliest(logits_BV, depth)
            tokens.append(token_B1)
            if depth + 1 < steps:
                logits_BV = expand(token_B1, zeros_B1).squeeze(1)
        return chain_tree(torch.cat(tokens, dim=1))

    def _grow_tree(self, root_logits_BV: Tensor, expand: Expand, scoring: _Scoring) -> DraftTree:
        steps, topk = self.strategy.num_steps, self.strategy.topk
        beam_BK, tokens_BK = scoring.best(root_logits_BV, 0, topk)
        batch_size = beam_BK.shape[0]
        parents_BK = torch.zeros_like(tokens_BK)
        picked_BK = torch.arange(topk, device=tokens_BK.device).expand(batch_size, topk)
        scores, tokens, picks = [beam_BK], [tokens_BK], []
        for depth in range(1, steps):
            logits_BKV = expand(tokens_BK, parents_BK)
            log_probs_BKk, children_BKk = scoring.best(logits_BKV, depth, topk)
            scores_BM = (log_probs_BKk + beam_BK.unsqueeze(2)).view(batch_size, -1)
            children_BM = children_BKk.view(batch_size, -1)
            picks.append(picked_BK)
            scores.append(scores_BM)
            tokens.append(children_BM)
            if depth + 1 < steps:
                beam_BK, picked_BK = scores_BM.topk(topk)
                tokens_BK = children_BM.gather(1, picked_BK)
                parents_BK = picked_BK.div(topk, rounding_mode="floor")
        return self._keep_best(torch.cat(scores, dim=1), torch.cat(tokens, dim=1), picks)

    def _keep_best(self, scores_BM: Tensor, tokens_BM: Tensor, picks: list[Tensor]) -> DraftTree:
        """Return the tree of the Q best candidates in growth order; `picks[e]` are those that depth
        e + 1 expanded.
        """
        strategy, topk = self.strategy, self.strategy.topk
        num_nodes = strategy.num_draft_tokens
        batch_size, num_candidates = scores_BM.shape
        best_BQ = (scores_BM - self._penalty_M).topk(num_nodes, sorted=False).indices
        kept_BQ = best_BQ.sort(dim=1).values
        log_scores_BQ = scores_BM.gather(1, kept_BQ)

        root_BK = tokens_BM.new_zeros(batch_size, topk)
        parents_BM = root_BK
        if picks:
            beams_BEK = torch.stack(picks, dim=1) + self._beam_starts_E1
            parents_BM = torch.cat(
                [root_BK, beams_BEK.view(batch_size, -1).repeat_interleave(topk, 1)], 1
            )
        # Maps a candidate (0: the root) to its node index; -2 if it was not kept.
        node_of_BM = tokens_BM.new_full((batch_size, num_candidates + 1), ROOT - 1)
        node_of_BM[:, 0].fill_(ROOT)
        node_of_BM.scatter_(1, kept_BQ + 1, self._nodes_Q.expand(batch_size, num_nodes))
        parents_BQ = node_of_BM.gather(1, parents_BM.gather(1, kept_BQ))
        # A child without its parent comes only from NaN logits. Such a node costs a row but is
        # never accepted.
        is_unused_BQ = (parents_BQ < ROOT) | ~(log_scores_BQ > -torch.inf)
        return DraftTree(
            token_ids_BQ=tokens_BM.gather(1, kept_BQ).masked_fill(is_unused_BQ, UNUSED),
            parents_BQ=parents_BQ.clamp(min=ROOT),
            depths_BQ=self._depths_M[kept_BQ],
            depth=strategy.num_steps,
        )
