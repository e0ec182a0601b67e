"""Routing replay: a training pass sends each token to the experts that the rollout sent it to.

Rollout Routing Replay (R3), arXiv 2510.11370. The weights of the experts still follow from the
router's own scores, so it learns. Megatron's replay object keeps one list for all models of a
process, and needs a route for every token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlt_megatron.mcore.token_places import TokenPlaces
from tlt_megatron.models.config import ExpertsConfig
from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.types import MicroBatch

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class RoutingReplay:
    """Replays the routes of micro-batches in the chunks of this rank's pipeline stage."""

    def __init__(
        self, stage: Sequence[GPTModel], experts: ExpertsConfig, groups: ProcessGroups
    ) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        self._groups = groups
        self._shape = len(experts.layers), experts.num_per_token
        # for each chunk of the stage, by index in `experts.layers`
        self._routers: list[dict[int, _RouterReplay]] = [{} for _ in stage]
        for chunk, routers in zip(stage, self._routers, strict=True):
            for router in chunk.modules():
                if isinstance(router, TopKRouter):
                    assert router.layer_number is not None
                    index = experts.layers.index(router.layer_number - 1)
                    routers[index] = _RouterReplay()
                    router.router_replay = routers[index]  # pyright: ignore[reportAttributeAccessIssue]

    def clear(self) -> None:
        """Forget all passes. Without another `start`, tokens are routed freely."""
        for routers in self._routers:
            for router in routers.values():
                router.clear()

    def start(
        self, chunk: int, micro_batch: MicroBatch, places: TokenPlaces, device: torch.device
    ) -> None:
        """Set the routes of a chunk's pass that comes next. Tokens without a route are routed
        freely.
        """
        routes = micro_batch.routes
        if routes is None:  # also set, as recomputation takes those of all passes in turn
            routes = torch.full((micro_batch.num_tokens, *self._shape), -1, dtype=torch.int16)
        parts = places.fill(routes, padding=-1).chunk(self._groups.num_parts)
        own = parts[self._groups.part].to(device)
        for index, router in self._routers[chunk].items():
            router.start(own[:, index].long())


class _RouterReplay:
    """Takes the place of Megatron's `RouterReplay` in one router."""

    def __init__(self) -> None:
        self._next: Tensor | None = None  # [P, K] int64, routes of the pass that comes next
        # Of the passes since `clear`. Recomputation runs each of them again, in the same order.
        self._done: deque[Tensor] = deque()

    def clear(self) -> None:
        self._next = None
        self._done.clear()

    def start(self, routes_PK: Tensor) -> None:
        assert self._next is None, "the routes of the last pass were not used"
        self._next = routes_PK

    def get_replay_topk(
        self,
        scores_PE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: TopK,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of each token's experts, [P, K]. Megatron's router calls
        this.
        """
        chosen = compute(scores_PE, topk, num_groups, group_topk)
        if self._next is not None:
            routes_PK, self._next = self._next, None
            self._done.append(routes_PK)
        elif self._done:
            routes_PK = self._done.popleft()
        else:
            return chosen
        routes_PK = routes_PK.where(routes_PK >= 0, chosen[1])
        return scores_PE.gather(1, routes_PK), routes_PK
