"""One speculative step: draft a tree, verify it in one pass, commit the tokens the target samples.

A row enters with its last token sampled but not computed: the root, at position n. It leaves in the
same state with m more tokens. So a step can replace any `DecodeBatch.forward`, with any strategy.
Position t of a lane holds the target's keys and values, the feature h_t, the token x_t and, in the
drafter's layer, the pair (x_{t+1}, h_t). Plain decoding keeps features too, so the drafter can start
in the middle of a rollout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import Role
from tlt_megatron.engines.embedded.graph_pool import Models, PassInputs
from tlt_megatron.engines.embedded.memory_plan import draft_slots_of
from tlt_megatron.engines.embedded.model_drafter import ModelDrafter, Roots
from tlt_megatron.engines.embedded.retrieval import Retriever
from tlt_megatron.engines.embedded.scheduler import Request
from tlt_megatron.models.attention.lanes import LaneView, drafted_bias
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.sampling import NoiseWindow, Sampled, is_searched, sample
from tlt_megatron.speculation.selector import StrategySelector
from tlt_megatron.speculation.token_counts import TokenCounts
from tlt_megatron.speculation.tree import DraftTree, ancestor_mask, chain_tree
from tlt_megatron.speculation.verify import Verdict, first_counts, verify_noise_keyed
from tlt_megatron.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a step adds to each row. S = depth + 1. Valid up to `verdict.num_committed_B`."""

    verdict: Verdict
    logprobs_BS: Tensor
    policy_logprobs_BS: Tensor
    kept: list[list[Tensor]]  # [B][S] `Sampled.kept`; [] without top-p and top-k
    first_by_depth: Tensor | None = None  # of a tree: see `verify.first_counts`


class Speculation:
    """The state of speculation that outlives a `generate` call: drafters and selector."""

    def __init__(
        self,
        draft: DraftInference | None,
        selector: StrategySelector,
        strategies: Sequence[SpeculationStrategy],
    ) -> None:
        """`selector` chooses from `strategies`. ValueError if one needs a drafter that is None."""
        drafting = [s for s in strategies if not s.is_off]
        learned = [s for s in drafting if s.is_learned]
        if learned and draft is None:
            raise ValueError(f"strategy={learned[0]} needs a learned drafter: there is none")
        self.strategies = tuple(drafting)
        self.draft = draft
        self.selector = selector
        self.retriever = Retriever()
        self.draft_slots = draft_slots_of(drafting)
        # of all responses, if the drafter proposes only the most frequent token ids
        self._token_counts: TokenCounts | None = None
        if draft is not None and draft.ids_C is not None:
            self._token_counts = TokenCounts(draft.config.vocab_size, len(draft.ids_C))

    def load_drafter(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the drafter's weights from the next step on. RuntimeError without a drafter."""
        if self.draft is None:
            raise RuntimeError("there is no learned drafter whose weights could be replaced")
        self.draft.load(weights)
        self.selector.drafter_changed()

    def target_changed(self) -> None:
        if self.draft is not None:
            self.draft.mark_stale()
        if self._token_counts is not None:
            self._token_counts.fade()

    def state_dict(self) -> dict[str, object]:
        """Return the measurements of acceptance and speed as JSON-able values."""
        counts = self._token_counts
        return {
            "selector": self.selector.state_dict(),
            "token_counts": None if counts is None else counts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. A selector's state that does not fit is ignored with a warning.

        ValueError for token counts of a larger vocabulary; then nothing is loaded.
        """
        saved = state.get("token_counts")  # older checkpoints have none
        if self._token_counts is not None and saved is not None:
            self._token_counts.load_state_dict(saved)
        self.selector.load_state_dict(state["selector"])

    def start(self, models: Models, params: SamplingParams) -> Speculator:
        """Return a Speculator for one `generate` call."""
        self.retriever.start()
        if self._token_counts is not None:
            assert self.draft is not None
            self.draft.draft_from(self._token_counts.most_frequent().to(models.policy.device))
        return Speculator(self, models, params)

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        if any(strategy.num_retrieved for strategy in self.strategies):
            self.retriever.finish(request, token_ids)
        if self._token_counts is not None:
            self._token_counts.add(token_ids)


class Speculator:
    """Drafts and verifies for the rows of a batch in lanes."""

    def __init__(self, speculation: Speculation, models: Models, params: SamplingParams) -> None:
        model = self._model = models.policy
        self._speculation = speculation
        self._graphs = models.graphs
        self._cache = models.cache
        self._params = params
        self._stop_ids = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=model.device)
        self._drafter = None
        if speculation.draft is not None:
            self._drafter = ModelDrafter(models, speculation.draft)
        self._noise = NoiseWindow(model.config.vocab_size)

    def set_changed(self) -> None:
        """Note that the rows of the batch or their order changed, or that a plain pass ran."""
        self._noise.start()

    def step(
        self,
        view: LaneView,
        roots: Roots,
        strategy: SpeculationStrategy,
        latest: Callable[[int], list[list[int]]],
    ) -> Committed:
        """Draft and verify once for every row. `latest` is for `Retriever.propose`."""
        params, noise_BSV = self._params, None
        if self._cache.has_features:  # roots sampled after a plain pass are not written yet
            at_B = roots.positions_B + view.starts_B
            self._cache.token_ids_T.index_copy_(0, at_B, roots.token_ids_B)
        num_rows = len(roots.requests) * (strategy.depth + 1)
        draft = self._speculation.draft
        is_reduced = draft is not None and draft.ids_C is not None
        # a tree reads the noise of all token ids, or makes that of its few
        is_read = (strategy.is_learned and not is_reduced) or not is_searched(
            num_rows, self._model.config.vocab_size, self._cache.device
        )
        if params.temperature > 0.0 and is_read and not roots.seeds_B.is_cuda:
            noise_BSV = self._noise.window(
                roots.seeds_B, roots.draw_positions_B + 1, strategy.depth + 1
            )
        if strategy.num_retrieved:
            found_BN = self._speculation.retriever.propose(
                roots.requests, roots.positions, latest, strategy.num_retrieved
            ).to(self._cache.device, non_blocking=True)
            return self._verify(view, roots, chain_tree(found_BN), noise_BSV)
        assert self._drafter is not None, strategy
        noise = None if is_reduced else noise_BSV
        tree = self._drafter.propose(view, roots, strategy, params, noise_BSV=noise)
        committed = self._verify(view, roots, tree, noise_BSV)
        if strategy.topk > 1:
            first = first_counts(tree, committed.verdict)
            committed = dataclasses.replace(committed, first_by_depth=first)
        return committed

    # ---- verification

    def _verify(
        self, view: LaneView, roots: Roots, tree: DraftTree, noise_BSV: Tensor | None
    ) -> Committed:
        """Run the target over root and tree, B * R tokens, and commit.

        `noise_BSV[:, d]` is for nodes at depth d; with None it is made where it is used.
        """
        num_rows, num_queries = tree.row_depths_BR.shape
        ancestors_BRR = ancestor_mask(tree)
        rows_R = torch.arange(num_queries, device=self._model.device)
        positions_BR = roots.positions_B.unsqueeze(1) + tree.row_depths_BR
        slots_P = view.slots(roots.positions_B.unsqueeze(1) + rows_R)
        length = view.read_length(roots.longest + num_queries)
        inputs = PassInputs(
            token_ids_P=tree.row_token_ids_BR(roots.token_ids_B).view(-1),
            positions_P=positions_BR.view(-1),
            slots_P=slots_P,
            bias_BRS=drafted_bias(view, roots.positions_B, ancestors_BRR, length),
        )
        hidden_PD, features_PF = self._graphs.run(Role.TARGET, inputs)
        sampled = self._sample(hidden_PD, roots, tree, noise_BSV)
        verdict = verify_noise_keyed(
            tree,
            sampled.token_ids_B.view(num_rows, num_queries),
            ancestors_BRR=ancestors_BRR,
            stop_token_ids=self._stop_ids,
            max_commit_B=roots.rooms_B,
        )
        self._settle(view, roots, tree, verdict, features_PF)
        path_BS = verdict.path_BS
        return Committed(
            verdict=verdict,
            logprobs_BS=sampled.logprobs_B.view(num_rows, -1).gather(1, path_BS),
            policy_logprobs_BS=sampled.policy_logprobs_B.view(num_rows, -1).gather(1, path_BS),
            kept=_along_paths(sampled.kept, path_BS),
        )

    def _sample(
        self, hidden_PD: Tensor, roots: Roots, tree: DraftTree, noise_BSV: Tensor | None
    ) -> Sampled:
        """Sample the target's token after every node, as plain decoding does."""
        params = self._params
        noise_PV, seeds_P, positions_P = None, roots.seeds_B, roots.draw_positions_B
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
        return sample(
            self._model.logits(hidden_PD),
            seeds_P,
            positions_P,
            params.temperature,
            params.top_p,
            params.top_k,
            noise_BV=noise_PV,
        )

    def _settle(
        self, view: LaneView, roots: Roots, tree: DraftTree, verdict: Verdict, features_PF: Tensor
    ) -> None:
        """Move the committed path to consecutive positions and make it visible."""
        cache, path_BS = self._cache, verdict.path_BS
        num_rows, num_slots = path_BS.shape
        base_B1 = roots.positions_B.unsqueeze(1)
        steps_S = torch.arange(num_slots, device=path_BS.device)
        target_P = view.slots(base_B1 + steps_S)
        if not tree.is_chain:
            cache.move_kv(view.slots(base_B1 + path_BS), target_P)
        num_queries = tree.row_depths_BR.shape[1]
        firsts_B = torch.arange(num_rows, device=path_BS.device) * num_queries
        rows_P = (path_BS + firsts_B.unsqueeze(1)).view(-1)
        if cache.has_routes:
            routes_PR = self._model.routes().index_select(0, rows_P)
            cache.routes_TR.index_copy_(0, target_P, routes_PR)
        if cache.has_features:
            cache.features_TD.index_copy_(0, target_P, features_PF.index_select(0, rows_P))
            cache.token_ids_T.index_copy_(0, target_P + 1, verdict.committed_tokens_BS.view(-1))
        is_committed_BS = steps_S < verdict.num_committed_B.unsqueeze(1)
        bias_BS = torch.where(is_committed_BS, 0.0, -torch.inf).to(cache.bias_T.dtype)
        cache.bias_T.index_copy_(0, target_P, bias_BS.view(-1))


def _along_paths(kept: Sequence[Tensor], path_BS: Tensor) -> list[list[Tensor]]:
    """Return the kept ids of the nodes on each row's path; `kept` holds those of all nodes, row by row."""
    num_queries = len(kept) // path_BS.shape[0]
    if not kept:
        return []
    return [
        [kept[row * num_queries + node] for node in path]
        for row, path in enumerate(path_BS.tolist())
    ]
