"""The learned drafter inside the embedded engine, with the KV layer after the target's last one.

Position t of that layer holds the pair (x_{t+1}, h_t) and predicts x_{t+2}. Drafted nodes use the
slots after the root in that layer, which the target's verify pass never reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import EagerReason, Role
from tlt_megatron.engines.embedded.graph_pool import Models, PassInputs
from tlt_megatron.engines.embedded.scheduler import Request
from tlt_megatron.models.attention.lanes import (
    LaneTreeAttention,
    LaneView,
    causal_bias,
    drafted_bias,
)
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.tree import DraftTree, Expand, TreeGrower
from tlt_megatron.types import SamplingParams

_EXTEND_POSITIONS = 64  # most unseen pairs per row that one pass computes
_LAG = 32  # rows with more unseen pairs catch up in separate passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """The last sampled tokens of the rows of a speculative step. Tensors are [B] int64."""

    requests: Sequence[Request]
    token_ids_B: Tensor
    positions_B: Tensor  # n, of the root in the whole sequence
    seeds_B: Tensor
    draw_positions_B: Tensor  # index of the root in its response; keys the noise
    rooms_B: Tensor  # most tokens to commit after the root, >= 1
    positions: Sequence[int]  # positions_B, on the host

    @property
    def longest(self) -> int:
        """Return the largest position + 1."""
        return max(self.positions) + 1


class ModelDrafter:
    """Grows draft trees with a DraftInference for rows in lanes."""

    def __init__(self, models: Models, draft: DraftInference) -> None:
        self._model = draft
        self._graphs = models.graphs
        self._cache = models.cache
        self._first_layer = models.policy.config.num_layers
        self._growers: dict[SpeculationStrategy, TreeGrower] = {}
        self._num_loads = draft.num_loads
        self._num_seen: dict[Request, int] = {}  # positions whose pairs are in the KV

    def propose(
        self,
        view: LaneView,
        roots: Roots,
        strategy: SpeculationStrategy,
        params: SamplingParams,
        *,
        noise_BSV: Tensor | None,
    ) -> DraftTree:
        """Compute the pairs that the drafter has not seen. Then grow a tree from every root.

        `noise_BSV` is None at temperature 0, if the drafter proposes only some token ids, and on
        CUDA, where the noise is never written.
        """
        if self._num_loads != self._model.num_loads:  # a new drafter has seen no positions
            self._num_loads = self._model.num_loads
            self._num_seen.clear()
        rows = list(zip(roots.positions, roots.requests, strict=True))
        num_unseen = [position - self._num_seen.get(request, 0) for position, request in rows]
        num_left = self._catch_up(view, roots.positions, num_unseen)
        hidden_BD, head_BD = self._extend(view, roots.positions_B, num_left, roots.longest)
        self._num_seen.update((request, position) for position, request in rows)
        grower = self._growers.get(strategy)
        if grower is None:
            grower = TreeGrower(strategy, device=self._cache.device)
            self._growers[strategy] = grower
        return grower.grow(
            self._model.logits(head_BD),
            self._expand_from(view, roots, hidden_BD, strategy),
            temperature=params.temperature,
            noise_BDV=noise_BSV,
            noise_keys=(roots.seeds_B, roots.draw_positions_B + 1),
            top_p=params.top_p,
            top_k=params.top_k,
            ids_V=self._model.ids_C,
        )

    def _catch_up(self, view: LaneView, positions: Sequence[int], num_unseen: Sequence[int]) -> int:
        """Compute the pairs of rows that lag far behind. Return the most that a row still lacks."""
        lagging = [n > _LAG for n in num_unseen]
        if all(lagging):
            return max(num_unseen)
        start = 0
        for is_lagging, run in itertools.groupby(lagging):
            end = start + len(list(run))
            if is_lagging:
                self._extend(
                    view.part(start, end),
                    torch.tensor(positions[start:end], device=self._cache.device),
                    max(num_unseen[start:end]),
                    max(positions[start:end]) + 1,
                    is_apart=True,
                )
            start = end
        return max(n for n in num_unseen if n <= _LAG)

    def _extend(
        self,
        view: LaneView,
        positions_B: Tensor,
        num_unseen: int,
        longest: int,
        *,
        is_apart: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute the last `num_unseen` pairs and return (hidden, head input) of the newest.

        `is_apart`: `view` holds only some of the rows.
        """
        run = partial(self._run_apart, view) if is_apart else partial(self._graphs.run, Role.DRAFT)
        cache, model = self._cache, self._model
        length = view.read_length(longest)
        # Features are the final state, then the tapped states. An EAGLE-3 drafter reads only the
        # tapped ones.
        feature_size = model.config.feature_size
        for start in range(num_unseen, 0, -_EXTEND_POSITIONS):
            end = max(start - _EXTEND_POSITIONS, 0)
            back_M = torch.arange(start, end, -1, device=cache.device)
            pairs_BM = (positions_B.unsqueeze(1) - back_M).clamp(min=0)
            slots_P = view.slots(pairs_BM)
            features_PF = cache.features_TD.index_select(0, slots_P)[:, -feature_size:]
            inputs = PassInputs(
                token_ids_P=cache.token_ids_T.index_select(0, slots_P + 1),
                positions_P=pairs_BM.view(-1),
                slots_P=slots_P,
                bias_BRS=causal_bias(view, pairs_BM, length),
                hidden_PD=model.fuse(features_PF),
            )
            hidden_PD, head_input_PD = run(inputs)
        num_rows, size = positions_B.shape[0], hidden_PD.shape[-1]
        hidden_BD = hidden_PD.view(num_rows, -1, size)[:, -1]
        return hidden_BD, head_input_PD.view(num_rows, -1, size)[:, -1]

    def _run_apart(self, view: LaneView, inputs: PassInputs) -> tuple[Tensor, Tensor]:
        assert inputs.hidden_PD is not None
        self._graphs.count_eager(Role.DRAFT, EagerReason.LAGGING)
        attention = LaneTreeAttention(
            view, inputs.slots_P, inputs.bias_BRS, first_layer=self._first_layer
        )
        return self._model.forward(
            inputs.token_ids_P, inputs.hidden_PD, inputs.positions_P, attention
        )

    def _expand_from(
        self, view: LaneView, roots: Roots, hidden_BD: Tensor, strategy: SpeculationStrategy
    ) -> Expand:
        """Return the drafter's pass over the nodes of one depth, for one tree."""
        (num_rows, size), device = hidden_BD.shape, hidden_BD.device
        topk, base_B = strategy.topk, roots.positions_B
        length = view.read_length(roots.longest + topk * (strategy.num_steps - 1))
        eye_KK = torch.eye(topk, dtype=torch.bool, device=device)
        self_BKK = eye_KK.expand(num_rows, -1, -1)
        offsets_K = torch.arange(topk, device=device)
        hidden_BKD = hidden_BD.unsqueeze(1)
        seen_BKX = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)
        depth = 0

        def expand(token_ids_BK: Tensor, parents_BK: Tensor) -> Tensor:
            nonlocal hidden_BKD, seen_BKX, depth
            parents_BK1 = parents_BK.unsqueeze(2)
            hidden_BKD = hidden_BKD.gather(1, parents_BK1.expand(-1, -1, size))
            seen_BKX = seen_BKX.gather(1, parents_BK1.expand(-1, -1, seen_BKX.shape[2]))
            seen_BKX = torch.cat((seen_BKX, self_BKK), dim=2)
            inputs = PassInputs(
                token_ids_P=token_ids_BK.reshape(-1),
                positions_P=(base_B + depth).unsqueeze(1).expand(-1, topk).reshape(-1),
                slots_P=view.slots(base_B.unsqueeze(1) + (offsets_K + depth * topk)),
                bias_BRS=drafted_bias(view, base_B, seen_BKX, length),
                hidden_PD=hidden_BKD.view(-1, size),
            )
            hidden_PD, head_input_PD = self._graphs.run(Role.DRAFT, inputs)
            hidden_BKD = hidden_PD.view(num_rows, topk, size)
            depth += 1
            return self._model.logits(head_input_PD).view(num_rows, topk, -1)

        return expand
