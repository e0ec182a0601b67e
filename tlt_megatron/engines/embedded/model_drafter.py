"""The learned drafter inside the embedded engine: which pairs its KV layer lacks, and its draft
trees.

`lane_steps.py` computes both on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import EagerReason
from tlt_megatron.engines.embedded.graph_pool import Models
from tlt_megatron.engines.embedded.lane_steps import Rows
from tlt_megatron.engines.embedded.scheduler import Request
from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.tree import DraftTree

_LAG = 32  # rows with more unseen pairs catch up in separate passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """The last sampled tokens of the rows of a speculative step."""

    requests: Sequence[Request]
    rows: Rows
    state_FB: Tensor  # the matrix of `rows`
    positions: Sequence[int]  # `rows.position`, on the host

    @property
    def longest(self) -> int:
        """Return the largest position + 1."""
        return max(self.positions) + 1


class ModelDrafter:
    """Grows draft trees with a DraftInference for rows in lanes."""

    def __init__(self, models: Models, draft: DraftInference) -> None:
        self._model = draft
        self._graphs = models.graphs
        self._num_loads = draft.num_loads
        self._num_seen: dict[Request, int] = {}  # positions whose pairs are in the KV

    def propose(
        self,
        view: LaneView,
        roots: Roots,
        strategy: SpeculationStrategy,
        *,
        noise_BSV: Tensor | None,
    ) -> DraftTree:
        """Compute the pairs that the drafter has not seen. Then grow a tree from every root.

        Without `noise_BSV` noise is made where it is used.
        """
        if self._num_loads != self._model.num_loads:  # a new drafter has seen no positions
            self._num_loads = self._model.num_loads
            self._num_seen.clear()
        rows = list(zip(roots.positions, roots.requests, strict=True))
        num_unseen = [position - self._num_seen.get(request, 0) for position, request in rows]
        num_left = self._catch_up(view, roots, num_unseen)
        self._num_seen.update((request, position) for position, request in rows)
        longest = roots.longest + strategy.topk * (strategy.num_steps - 1)
        return self._graphs.draft(view, roots.state_FB, strategy, num_left, longest, noise_BSV)

    def _catch_up(self, view: LaneView, roots: Roots, num_unseen: Sequence[int]) -> int:
        """Compute the pairs of rows that lag far behind, but for the newest. Return the most that
        another row lacks.
        """
        lagging = [n > _LAG for n in num_unseen]
        if all(lagging):
            return max(num_unseen)
        start = 0
        for is_lagging, run in itertools.groupby(lagging):
            end = start + len(list(run))
            if is_lagging:
                self._graphs.catch_up(
                    view.part(start, end),
                    Rows(*roots.state_FB[:, start:end]),
                    max(num_unseen[start:end]),
                    1,
                    max(roots.positions[start:end]) + 1,
                    EagerReason.LAGGING,
                )
            start = end
        return max(n for n in num_unseen if n <= _LAG)
