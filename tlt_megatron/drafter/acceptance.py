"""How many passes an engine needs for verified responses, with any drafter and without the policy.

The token at a position does not depend on the drafter. So a drafted token is accepted if and only
if it is the token of the response. `spot/holdout.py` compares drafters in this way. Shapes: P rows
of a batch as in packing.py, R roots (rows whose token is the last committed one), Q drafted nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.packing import pack_batch
from tlt_megatron.models.attention.packed import BranchAttention, UnrolledAttention
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.speculation.sampling import request_seed
from tlt_megatron.speculation.tree import UNUSED, Expand, TreeGrower, deepest_path
from tlt_megatron.types import DraftSequence, SamplingParams

_NODES_AT_ONCE = 512  # drafted nodes whose vocabulary-sized scores exist at once


class Replay:
    """Verified responses, to be drafted again from the places where an engine starts its passes.

    Example: after `(is_start_P,) = replay.starts(model, [strategy])`, the accept length of an
    engine with this strategy is `replay.is_committed_P.sum() / is_start_P.sum()`.
    """

    def __init__(
        self,
        sequences: Sequence[DraftSequence],
        params: SamplingParams,
        device: torch.device | None = None,
        ids_V: Tensor | None = None,
    ) -> None:
        """Each of `sequences` has its `request`. `ids_V` are the ids that are drafted, ascending;
        None: all.
        """
        batch = pack_batch(sequences)
        lengths = torch.tensor(batch.lengths)
        drawn = [_is_drawn(each) for each in sequences]
        before_P, root_P, next_P = (
            torch.cat([x[i : i + n] for x, n in zip(drawn, batch.lengths, strict=True)])
            for i in range(3)
        )
        # The rows whose next token is committed by a speculative pass. A prefill brings the first
        # token of each run of the policy's tokens.
        self.is_committed_P = root_P & next_P
        self._first_roots = self.is_committed_P & (~before_P | (batch.position_ids == 0))
        rows_P = torch.arange(batch.num_rows)
        ends = torch.cat((rows_P[~self.is_committed_P], lengths.cumsum(0))).unique()
        room_P = ends[torch.searchsorted(ends, rows_P, right=True).clamp(max=len(ends) - 1)]
        self._first_P = rows_P - batch.position_ids  # the first row of its sequence
        self._room_P = (room_P - rows_P) * self.is_committed_P  # tokens that a pass may commit
        seeds = [request_seed(params.seed, *each.request or ()) for each in sequences]
        offsets = 2 - torch.tensor([each.loss_start for each in sequences])
        device = device or batch.features.device
        self._batch, self._params, self._ids_V = batch.to(device), params, ids_V
        self._seeds_P = torch.tensor(seeds).repeat_interleave(lengths).to(device)
        self._offsets_P = offsets.repeat_interleave(lengths).to(device)
        self._sequence_P = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)

    def starts(self, model: DraftModel, strategies: Sequence[SpeculationStrategy]) -> list[Tensor]:
        """Return the rows [P] bool at which an engine starts its passes, for each strategy.

        With weights that are not finite, that is every row with a next token.
        """
        batch = self._batch
        trunk = UnrolledAttention(batch.lengths)
        model.rotary.reserve(max(batch.lengths) + max(each.depth for each in strategies))
        hidden_PD = model.fuse(batch.features)
        states = model(batch.token_ids, hidden_PD, batch.position_ids, trunk)
        if not all(state.isfinite().all() for state in states):
            return [self.is_committed_P] * len(strategies)
        found = {}
        chain_P = torch.full_like(self._room_P, -1)  # longest first: shorter ones accept its start
        for strategy in sorted(strategies, key=lambda each: -each.depth):
            grower = TreeGrower(strategy, device=self._seeds_P.device)
            drafts = _Drafts(model, strategy, grower, trunk.steps[0], *states)
            accepted_P = chain_P if strategy.is_chain else torch.full_like(chain_P, -1)
            found[strategy] = self._walk(drafts, accepted_P)
        return [found[strategy] for strategy in strategies]

    def _walk(self, drafts: _Drafts, accepted_P: Tensor) -> Tensor:
        """Return [P] bool: the rows where passes start.

        `accepted_P` has the tokens that drafts from a row accept, -1 where none was drafted. All
        rows are drafted, a few hundred at once: that takes fewer calls than to follow the passes.
        """
        roots = (self.is_committed_P & (accepted_P < 0)).nonzero().squeeze(1)
        for part in roots.split(max(_NODES_AT_ONCE // drafts.strategy.topk, 1)):
            if len(part):
                accepted_P[part] = self._accepted(drafts, part)
        depth = drafts.strategy.depth
        committed = torch.minimum(accepted_P.clamp(max=depth) + 1, self._room_P).tolist()
        is_start_P = torch.zeros_like(self.is_committed_P)
        for root in self._first_roots.nonzero().squeeze(1).tolist():
            end = root + int(self._room_P[root])
            while root < end:
                is_start_P[root] = True
                root += committed[root]
        return is_start_P

    def _accepted(self, drafts: _Drafts, roots_R: Tensor) -> Tensor:
        """Return [R]: how many tokens of the response the drafts from each root have."""
        batch, device = self._batch, self._seeds_P.device
        seen = slice(int(self._first_P[roots_R[0]]), int(roots_R[-1]) + 1)
        roots_R = roots_R.to(device)
        rows_P = torch.arange(seen.start, seen.stop, device=device)
        is_seen_RP = self._sequence_P[seen] == self._sequence_P[roots_R].unsqueeze(1)
        is_seen_RP &= rows_P <= roots_R.unsqueeze(1)
        positions_R = batch.position_ids[roots_R]
        attention = BranchAttention(drafts.trunk_PKH[seen], is_seen_RP)
        tree = drafts.grower.grow(
            drafts.logits(drafts.head_PD[roots_R], self._ids_V),
            drafts.expand_from(roots_R, positions_R, attention, self._ids_V),
            self._params,
            noise_keys=(self._seeds_P[roots_R], positions_R + self._offsets_P[roots_R]),
            ids_V=self._ids_V,
        )
        steps_S = torch.arange(tree.depth, device=device)
        path_RS = batch.labels[(roots_R.unsqueeze(1) + steps_S).clamp(max=batch.num_rows - 1)]
        is_over_RS = steps_S >= self._room_P.to(device)[roots_R].unsqueeze(1)
        path_RS = path_RS.masked_fill(is_over_RS, UNUSED - 1)
        is_match_RQ = path_RS.gather(1, tree.depths_BQ - 1) == tree.token_ids_BQ
        return deepest_path(tree, is_match_RQ)[0].cpu()


class _Drafts(NamedTuple):
    """What grows the trees of a strategy from rows of a batch."""

    model: DraftModel
    strategy: SpeculationStrategy
    grower: TreeGrower
    trunk_PKH: Tensor  # keys and values of the rows
    hidden_PD: Tensor
    head_PD: Tensor

    def logits(self, head_QD: Tensor, ids_V: Tensor | None) -> Tensor:
        """Return the logits of these token ids."""
        if ids_V is None:
            return self.model.logits(head_QD)
        head_VD = self.model.lm_head_VD
        return F.linear(head_QD.to(head_VD.dtype), head_VD[ids_V])

    def expand_from(
        self,
        roots_R: Tensor,
        positions_R: Tensor,
        attention: BranchAttention,
        ids_V: Tensor | None,
    ) -> Expand:
        """Return the drafter's pass over the nodes of one depth, from these roots."""
        hidden_QD, (num_roots, topk) = self.hidden_PD[roots_R], (len(roots_R), self.strategy.topk)
        first_R1 = torch.arange(num_roots, device=roots_R.device).unsqueeze(1)
        depth = 0

        def expand(token_ids_RK: Tensor, parents_RK: Tensor) -> Tensor:
            nonlocal hidden_QD, depth
            parents_Q = (first_R1 * (topk if depth else 1) + parents_RK).view(-1)
            depth += 1
            attention.follow(parents_Q)
            positions_Q = (positions_R + depth).repeat_interleave(topk)
            hidden_QD, head_QD = self.model(
                token_ids_RK.reshape(-1), hidden_QD[parents_Q], positions_Q, attention
            )
            return self.logits(head_QD, ids_V).view(num_roots, topk, -1)

        return expand


def _is_drawn(sequence: DraftSequence) -> Tensor:
    """Return [T] bool: whether the policy drew the token."""
    is_response_T = torch.arange(sequence.token_ids.numel()) >= sequence.loss_start
    return is_response_T if sequence.loss_mask is None else is_response_T & sequence.loss_mask
