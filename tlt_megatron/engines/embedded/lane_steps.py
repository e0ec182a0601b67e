"""The two steps over rows in lanes: DRAFT grows a draft tree for every row, TARGET verifies it and
commits tokens.

A row enters TARGET with its last token sampled but not computed: the root, at position n. It leaves
in the same state with m more tokens. Plain decoding is TARGET with an empty tree. Position t of a
lane holds the target's keys and values, the feature h_t, the token x_t and, in the drafter's layer,
the pair (x_{t+1}, h_t), which predicts x_{t+2}. Drafted nodes use the slots after the root.

Nothing is read back, and shapes follow from shapes alone: `GraphPool` captures each step whole.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import GraphKey
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.attention.lanes import LaneView, LooseView, causal, drafted
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.speculation.sampling import Sampled, kept_ids, sample, sample_each
from tlt_megatron.speculation.tree import (
    ROOT,
    SCALE,
    UNUSED,
    DraftTree,
    Expand,
    TreeGrower,
    chain_tree,
)
from tlt_megatron.speculation.verify import Verdict, first_on_path, verify_noise_keyed
from tlt_megatron.types import SamplingParams


class Rows(NamedTuple):
    """Views of the state matrix of a batch, each [B] int64. Those from `position` on grow with the
    tokens.
    """

    token: Tensor  # the root
    seed: Tensor
    last: Tensor  # `count` at the final token
    position: Tensor  # the position of the root in the whole sequence
    count: Tensor  # the position of the root in the response, which keys the noise
    out: Tensor  # the index of the root in the outputs
    slot: Tensor  # the KV slot of the root


class LaneBatch(NamedTuple):
    """Rows in lanes, over which a step runs."""

    view: LaneView
    state_FB: Tensor  # the matrix of `rows`
    rows: Rows
    # for the positions after the roots; None: noise is made where it is used
    noise_BSV: Tensor | None = None
    # for each row, if not all of them sample as the steps do; a drafter ranks as the steps do
    sampling: tuple[SamplingParams, ...] = ()


class Report(NamedTuple):
    """What the host learns about a step, by row."""

    has_ended: list[bool]  # whether the last committed token completes the response
    num_committed: list[int]
    num_accepted: list[int]  # drafted tokens, also after the end
    token_ids: list[list[int]]  # committed
    first_by_depth: list[int]  # summed over rows: see `verify.first_on_path`; 0 for a chain
    # the ids that top-p and top-k kept at each committed token; [] without
    kept: list[list[Tensor]]


class Committed(NamedTuple):
    """What TARGET adds to each row, at most S = depth + 1 tokens. Each row is valid up to
    `num_committed`.
    """

    tokens_BS: Tensor
    logprobs_BS: Tensor
    policy_logprobs_BS: Tensor
    root_B: Tensor  # the last of these tokens
    # has_ended, num_committed, num_accepted, S - 1 times is_first, S tokens, S tables of kept ids
    report_BX: Tensor

    @property
    def num_committed_B(self) -> Tensor:
        return self.report_BX[:, 1]

    def read(self) -> Report:
        """Wait for the step. This is its only read-back."""
        num_rows, num_slots = self.tokens_BS.shape
        report_BX = self.report_BX.cpu()
        sizes = [num_slots + 2, 2 * num_slots + 2]
        facts_BX, tokens_BS, kept_BX = report_BX.tensor_split(sizes, dim=1)
        ended, num_committed, num_accepted, *first = facts_BX.t().tolist()
        kept: list[list[Tensor]] = []
        if kept_BX.shape[1]:
            ids = kept_ids(kept_BX.reshape(num_rows * num_slots, -1))
            starts = range(0, len(ids), num_slots)
            kept = [ids[i : i + n] for i, n in zip(starts, num_committed, strict=True)]
        return Report(
            has_ended=[flag == 1 for flag in ended],
            num_committed=num_committed,
            num_accepted=num_accepted,
            token_ids=[ids[:n] for ids, n in zip(tokens_BS.tolist(), num_committed, strict=True)],
            first_by_depth=[sum(flags) for flags in first],
            kept=kept,
        )


class LaneSteps:
    """The steps over lanes of `lane` slots, and the constants that they read. With a `lane` of 0,
    lanes start anywhere.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KvCache,
        lane: int,
        draft: DraftInference | None,
        params: SamplingParams,
    ) -> None:
        self.cache = cache
        self.lane = lane
        self.params = params
        self._model = model
        self._draft = draft
        self._draft_layer = model.config.num_layers  # its index in the cache
        self._stop_ids = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=cache.device)
        self._last_slot = cache.bias_T.shape[0] - 1
        self._grower = functools.cache(partial(TreeGrower, device=cache.device))
        # By number of rows, of captured steps.
        self._view = functools.cache(lambda num_rows: LaneView(cache, num_rows=num_rows, lane=lane))
        # What padding consists of: rows that write to the scratch page, and nodes below the root.
        shape = len(Rows._fields), 1
        self.padding_F1 = torch.zeros(shape, dtype=torch.int64, device=cache.device)
        padding = Rows(*self.padding_F1)
        padding.last.fill_(1)
        padding.slot.fill_(cache.scratch_slot)
        self.no_node_311 = torch.tensor((UNUSED, ROOT, 1), device=cache.device).view(3, 1, 1)

    def reads(self) -> Hashable:
        """Return the constants of the steps and the addresses that they read besides their inputs:
        a graph needs the same.
        """
        cache, draft = self.cache, self._draft
        tensors = [
            cache.kv_LKTH,
            *self._model.tensors_read(),
            *(draft.tensors_read() if draft else ()),
        ]
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        p = self.params
        sampling = p.temperature, p.top_p, p.top_k, p.stop_token_ids
        return self.lane, cache.scratch_slot, cache.tap_layers, sampling, addresses

    def run(self, key: GraphKey, state_FB: Tensor, tree_3BQ: Tensor) -> tuple[Tensor, ...]:
        """Run the step of a graph: DRAFT returns `DraftTree.tensors`, and TARGET returns a
        `Committed`.
        """
        rows = Rows(*state_FB)
        if self.lane:
            view = self._view(key.batch_size)
        else:  # padding reads from slot 0: a tree may be wider than the scratch page
            starts_B = (rows.slot - rows.position) % self.cache.scratch_slot
            view = LooseView(self.cache, starts_B, rows.position)
        batch = LaneBatch(view, state_FB, rows)
        if key.strategy is not None:
            return self.draft(batch, key.strategy, key.num_rows, key.length).tensors
        tree = DraftTree(*tree_3BQ, depth=key.depth)
        if key.num_rows == 1 or key.is_chain:
            tree = chain_tree(tree.token_ids_BQ)
        return self.target(batch, tree, key.length)

    def _slots(self, rows: Rows, offsets: Tensor) -> Tensor:
        """Return the slots at offsets [R] or [B, R] from the roots, [B*R]. Those of padding stay in
        the scratch page.
        """
        return (rows.slot.unsqueeze(1) + offsets).clamp_(max=self._last_slot).view(-1)

    def _write_roots(self, rows: Rows) -> None:
        if self.cache.has_features:
            self.cache.token_ids_T.index_copy_(0, rows.slot, rows.token)

    # ---- DRAFT

    def draft(
        self, batch: LaneBatch, strategy: SpeculationStrategy, num_unseen: int, longest: int
    ) -> DraftTree:
        """Compute the last `num_unseen` pairs of every row. Then grow a tree from every root.

        `longest` counts positions of a row, those that growth writes included.
        """
        draft, rows, grower = self._draft, batch.rows, self._grower(strategy)
        assert draft is not None
        self._write_roots(rows)
        pairs, noise_BSV = self._pairs(batch, num_unseen, 0, longest), batch.noise_BSV
        chains = draft.draft_chains if strategy.topk == 1 and not self.params.is_cut else None
        if noise_BSV is not None and chains is not None and chains.takes(pairs[-1]):
            offsets_BDV = grower.offsets(noise_BSV, self.params, draft.dtype)
            return chain_tree(chains(*pairs, offsets_BDV, SCALE))
        hidden_BD, head_BD = (
            state_PD.view(len(rows.slot), num_unseen, -1)[:, -1]
            for state_PD in draft.forward(*pairs)
        )
        del pairs  # frees the mask of their attention
        return grower.grow(
            draft.logits(head_BD),
            self._expand_from(batch, hidden_BD, strategy, longest),
            self.params,
            noise_keys=(rows.seed, rows.count + 1),
            noise_BDV=noise_BSV,
            ids_V=draft.ids_C,
        )

    def extend(self, batch: LaneBatch, start: int, end: int, longest: int) -> None:
        """Compute the pairs from `start` positions before the root to `end` before it."""
        assert self._draft is not None
        self._draft.forward(*self._pairs(batch, start, end, longest))

    def _pairs(
        self, batch: LaneBatch, start: int, end: int, longest: int
    ) -> tuple[Tensor, Tensor, Tensor, Attention]:
        """Return the inputs of `DraftInference.forward` for these pairs."""
        cache, draft, view, rows = self.cache, self._draft, batch.view, batch.rows
        assert draft is not None
        back_M = torch.arange(start, end, -1, device=cache.device)
        pairs_BM = (rows.position.unsqueeze(1) - back_M).clamp_(min=0)
        slots_P = self._slots(rows, pairs_BM - rows.position.unsqueeze(1))
        visible = causal(view, pairs_BM, view.read_length(longest))
        # Features are the final state, then the tapped states. An EAGLE-3 drafter reads only the
        # tapped ones.
        of_drafter = slice(-draft.config.feature_size, None)
        return (
            cache.token_ids_T.index_select(0, slots_P + 1),
            draft.fuse(cache.features_TD.index_select(0, slots_P)[:, of_drafter]),
            pairs_BM.view(-1),
            draft.lanes(view, slots_P, visible, first_layer=self._draft_layer),
        )

    def _expand_from(
        self, batch: LaneBatch, hidden_BD: Tensor, strategy: SpeculationStrategy, longest: int
    ) -> Expand:
        """Return the drafter's pass over the nodes of one depth, for one tree."""
        view, rows = batch.view, batch.rows
        (num_rows, size), device, draft = hidden_BD.shape, hidden_BD.device, self._draft
        assert draft is not None
        topk, length = strategy.topk, view.read_length(longest)
        eye_KK = torch.eye(topk, dtype=torch.bool, device=device)
        self_BKK = eye_KK.expand(num_rows, -1, -1)
        offsets_K = torch.arange(topk, device=device)
        hidden_BKD = hidden_BD.unsqueeze(1)
        seen_BKX = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)
        depth = 0

        def expand(token_ids_BK: Tensor, parents_BK: Tensor) -> Tensor:
            nonlocal hidden_BKD, seen_BKX, depth
            if topk > 1:  # else the only node of a depth is the parent of the next one
                parents_BK1 = parents_BK.unsqueeze(2)
                hidden_BKD = hidden_BKD.gather(1, parents_BK1.expand(-1, -1, size))
                seen_BKX = seen_BKX.gather(1, parents_BK1.expand(-1, -1, seen_BKX.shape[2]))
            seen_BKX = torch.cat((seen_BKX, self_BKK), dim=2)
            slots_P = self._slots(rows, offsets_K + depth * topk)
            now_BKX = seen_BKX
            visible = drafted(view, rows.position, lambda: now_BKX, length, is_chain=topk == 1)
            attention = draft.lanes(view, slots_P, visible, first_layer=self._draft_layer)
            hidden_PD, head_PD = draft.forward(
                token_ids_BK.reshape(-1),
                hidden_BKD.view(-1, size),
                (rows.position + depth).unsqueeze(1).expand(-1, topk).reshape(-1),
                attention,
            )
            hidden_BKD = hidden_PD.view(num_rows, topk, size)
            depth += 1
            return draft.logits(head_PD).view(num_rows, topk, -1)

        return expand

    # ---- TARGET

    def target(self, batch: LaneBatch, tree: DraftTree, longest: int) -> Committed:
        """Run the target over root and tree, B * R tokens, and commit the tokens that it samples.

        `longest` counts positions of a row, those of the tree included.
        """
        model, cache, view, rows = self._model, self.cache, batch.view, batch.rows
        self._write_roots(rows)
        depths_BR = tree.row_depths_BR
        num_rows, num_queries = depths_BR.shape
        slots_P = self._slots(rows, torch.arange(num_queries, device=cache.device))
        length = view.read_length(longest)
        visible = drafted(
            view, rows.position, lambda: tree.ancestors_BRR, length, is_chain=tree.is_chain
        )
        attention = model.arithmetic.lanes(view, slots_P, visible)
        hidden_PD, features_PF = model.forward(
            tree.row_token_ids_BR(rows.token).view(-1),
            (rows.position.unsqueeze(1) + depths_BR).view(-1),
            attention,
            cache.tap_layers,
        )
        sampled = self._sample(hidden_PD, batch, tree)
        rooms_B = rows.last - rows.count
        verdict = verify_noise_keyed(
            tree,
            sampled.token_ids_B.view(num_rows, num_queries),
            stop_token_ids=self._stop_ids,
            max_commit_B=rooms_B,
        )
        self._settle(slots_P.view(num_rows, -1), tree, verdict, features_PF)
        tokens_BS = verdict.committed_tokens_BS
        last_B1 = verdict.num_committed_B.unsqueeze(1) - 1
        logprobs_BR, policy_logprobs_BR = (
            of_node_P.view(num_rows, -1)
            for of_node_P in (sampled.logprobs_B, sampled.policy_logprobs_B)
        )
        return Committed(
            tokens_BS=tokens_BS,
            logprobs_BS=tree.along(verdict.path_BS, logprobs_BR),
            policy_logprobs_BS=tree.along(verdict.path_BS, policy_logprobs_BR),
            root_B=tokens_BS.gather(1, last_B1).squeeze(1),
            report_BX=_report(tree, verdict, rooms_B, sampled.kept),
        )

    def _sample(self, hidden_PD: Tensor, batch: LaneBatch, tree: DraftTree) -> Sampled:
        """Sample the target's token after every node, as plain decoding does. The noise of a node
        at depth d is `noise_BSV[:, d]`.
        """
        noise_BSV, noise_PV = None if batch.sampling else batch.noise_BSV, None
        seeds_P, positions_P = batch.rows.seed, batch.rows.count
        if noise_BSV is None:
            positions_BR = positions_P.unsqueeze(1) + 1 + tree.row_depths_BR
            seeds_P = seeds_P.unsqueeze(1).expand_as(positions_BR).reshape(-1)
            positions_P = positions_BR.view(-1)
        else:
            num_rows, _, vocab_size = noise_BSV.shape
            if tree.is_chain:
                noise_PV = noise_BSV.reshape(-1, vocab_size)
            else:
                rows_B1 = torch.arange(num_rows, device=noise_BSV.device).unsqueeze(1)
                noise_PV = noise_BSV[rows_B1, tree.row_depths_BR].view(-1, vocab_size)
        logits_PV = self._model.logits(hidden_PD)
        if batch.sampling:
            each = [one for one in batch.sampling for _ in range(tree.num_rows)]
            return sample_each(logits_PV, seeds_P, positions_P, each)
        return sample(logits_PV, seeds_P, positions_P, self.params, noise_BV=noise_PV)

    def _settle(
        self, slots_BR: Tensor, tree: DraftTree, verdict: Verdict, features_PF: Tensor
    ) -> None:
        """Move the committed path to consecutive positions and make it visible."""
        cache, path_BS = self.cache, verdict.path_BS
        num_rows, num_slots = path_BS.shape
        target_P, nodes_P = slots_BR[:, :num_slots].reshape(-1), None
        if not tree.is_chain:
            cache.move_kv(slots_BR.gather(1, path_BS).view(-1), target_P)
            firsts_B = torch.arange(num_rows, device=path_BS.device) * tree.num_rows
            nodes_P = (path_BS + firsts_B.unsqueeze(1)).view(-1)
        if cache.has_routes:
            routes_PR = self._model.routes()
            routes_PR = routes_PR if nodes_P is None else routes_PR.index_select(0, nodes_P)
            cache.routes_TR.index_copy_(0, target_P, routes_PR)
        if cache.has_features:
            moved_PF = features_PF if nodes_P is None else features_PF.index_select(0, nodes_P)
            cache.features_TD.index_copy_(0, target_P, moved_PF)
            cache.token_ids_T.index_copy_(0, target_P + 1, verdict.committed_tokens_BS.view(-1))
        steps_S = torch.arange(num_slots, device=path_BS.device)
        is_committed_BS = steps_S < verdict.num_committed_B.unsqueeze(1)
        bias_BS = torch.where(is_committed_BS, 0.0, -torch.inf).to(cache.bias_T.dtype)
        cache.bias_T.index_copy_(0, target_P, bias_BS.view(-1))


def _report(tree: DraftTree, verdict: Verdict, rooms_B: Tensor, kept: Tensor | None) -> Tensor:
    """Return `Committed.report_BX`. `kept` are the kept ids of all nodes, row by row."""
    path_BS = verdict.path_BS
    has_ended_B = verdict.is_stopped_B | (verdict.num_committed_B >= rooms_B)
    counts = (has_ended_B, verdict.num_committed_B, verdict.num_accepted_B)
    first = path_BS.new_zeros(1).expand_as(path_BS[:, 1:])
    parts = [torch.stack(counts, dim=1), first if tree.is_chain else first_on_path(tree, verdict)]
    parts.append(verdict.committed_tokens_BS)
    if kept is not None:
        kept_BRX = kept.view(path_BS.shape[0], -1, kept.shape[1])
        index_BSX = path_BS.unsqueeze(2).expand(-1, -1, kept.shape[1])
        parts.append(kept_BRX.gather(1, index_BSX).flatten(1))
    return torch.cat(parts, dim=1)
