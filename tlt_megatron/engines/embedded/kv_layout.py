"""Where the rows of the running batch have their KV: all in pages, or each in a lane.

A lane is the contiguous range of KV slots of one row, prompt included. torch's operators read all
lanes at the length of the longest row, and pages only at their row's length. Speculation and
captured graphs need lanes. Rows start in pages. They move to lanes once, when lanes for all
requests fit and cost little. Where they do not fit, rows of captured graphs have lanes that grow:
see `loose_lanes.py`.
The decode batch calls this class when rows join, leave or need a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tlt_megatron.engines.embedded.graph_plan import EagerReason, Role
from tlt_megatron.engines.embedded.loose_lanes import LooseLanes
from tlt_megatron.engines.embedded.model_pair import Models
from tlt_megatron.engines.embedded.request import Request, longest_of
from tlt_megatron.engines.embedded.scheduler import Scheduler
from tlt_megatron.models.attention.lanes import LaneView, LooseView, Visible

_LANE_WASTE = 1.25  # rows move to lanes if these cost at most this factor more
_LANE_FREE_POSITIONS = 512  # cost of merging pages, in positions of attention


class KvLayout:
    """The KV of the rows of one batch.

    Row b of every argument is the b-th running request.
    """

    def __init__(self, models: Models, scheduler: Scheduler, draft_slots: int) -> None:
        """A speculative step may write `draft_slots` slots after a sequence."""
        self._models = models
        self._cache = models.cache
        self._scheduler = scheduler
        self._draft_slots = draft_slots
        self._paged = models.policy.arithmetic.paged(models.cache)
        self._lane = 0  # slots of a lane; 0 while rows are in pages
        self._loose: LooseLanes | None = None  # instead of lanes of one length
        self._view: LaneView | None = None  # a view of the current rows
        self.is_placed = False  # whether `place` has run since rows joined, left or took a page

    @property
    def has_lanes(self) -> bool:
        return self._lane > 0 or self._loose is not None

    # ---- rows join and leave

    def join(self, first_row: int, requests: Sequence[Request]) -> None:
        """Add new rows."""
        if self._lane:
            assert all(each.saved is None for each in requests), "preempted although all have lanes"
            self._to_lanes(first_row, requests)

    def leave(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Keep only the rows `kept`, in this order. In lanes, move those whose row changes."""
        for row, old in enumerate(kept):
            if self._lane and row != old:
                self._to_lanes(row, [requests[old]])

    def set_changed(self) -> None:
        """Note that rows joined, left or took a page."""
        self.is_placed = False
        self._view = None

    def grow(self, requests: Sequence[Request]) -> set[Request]:
        """Take a page for each row whose next token starts one, or lengthen lanes. Return the
        requests preempted.
        """
        preempted: set[Request] = set()
        if requests and not self.has_lanes and self._models.graphs.has_graphs:
            self.move_to_lanes(requests)
            self._start_loose()
        if self._loose is not None and (short := self._loose.find_short(requests)):
            preempted.update(self._loose.lengthen(short))
            self.set_changed()
        if self.has_lanes:
            return preempted
        size = self._cache.page_size
        due = [r for r in requests if r.position == r.kv.num_prompt + len(r.kv.pages) * size]
        for request in sorted(due, key=lambda request: request.order):
            if request not in preempted:
                preempted.update(self._scheduler.grow(request))
        if due:
            self.set_changed()
        return preempted

    # ---- one pass

    def place(self, requests: Sequence[Request]) -> list[int]:
        """Choose pages or lanes. Return the slot of each row's next token."""
        if not self.has_lanes and (
            self._models.graphs.has_graphs  # graphs save more than pages do
            or (not self._scheduler.has_waiting and self._lanes_pay(requests))
        ):
            self.move_to_lanes(requests)
        self.is_placed = True
        if self._lane:
            return [row * self._lane + request.position for row, request in enumerate(requests)]
        cache = self._cache
        if self._loose is not None:
            return [r.kv.pages[0] * cache.page_size + r.position for r in requests]
        cache.compact()
        self._paged.rebuild([request.kv for request in requests])
        return [
            request.kv.pages[-1] * cache.page_size
            + (request.position - request.kv.num_prompt) % cache.page_size
            for request in requests
        ]

    def run(
        self, token_ids_B: Tensor, positions_B: Tensor, slots_B: Tensor, longest: int
    ) -> Tensor:
        """Run one token of every row through the policy, without graphs. Return its hidden states
        and keep its features.

        `longest` is the number of positions of the longest row.
        """
        models, cache = self._models, self._cache
        cache.mark_written(slots_B)
        reason = EagerReason.PAGES
        if self._lane:
            reason = EagerReason.OFF
            view = self.view(slots_B, positions_B)
            length = view.read_length(longest)
            visible = Visible(length, partial(view.committed_bias, length), is_chain=True)
            attention = models.policy.arithmetic.lanes(view, slots_B, visible)
        else:
            attention = self._paged.pass_of(slots_B, positions_B)
        models.graphs.count_eager(Role.TARGET, reason)
        hidden_BD, features_BF = models.policy.forward(
            token_ids_B, positions_B, attention, cache.tap_layers
        )
        cache.keep_features(slots_B, features_BF, token_ids_B)
        if cache.has_routes:
            cache.routes_TR.index_copy_(0, slots_B, models.policy.routes())
        return hidden_BD

    def view(self, slots_B: Tensor, positions_B: Tensor) -> LaneView:
        """Return a view of the rows, whose next tokens have these slots and positions."""
        if self._loose is not None:
            return LooseView(self._cache, slots_B - positions_B, positions_B)
        if self._view is None:
            self._view = LaneView(self._cache, num_rows=len(slots_B), lane=self._lane)
        return self._view

    # ---- lanes

    def _lanes_pay(self, requests: Sequence[Request]) -> bool:
        """Whether it costs plain decoding little to pad every row to the longest."""
        num_pages = sum(len(request.kv.pages) for request in requests)
        num_pages += sum(len(state.pages) for state in {request.state for request in requests})
        limit = _LANE_WASTE * num_pages * self._cache.page_size + _LANE_FREE_POSITIONS
        return len(requests) * (longest_of(requests) - 1) <= limit

    def move_to_lanes(self, requests: Sequence[Request]) -> None:
        """Move all rows to lanes of full length, if those of all requests fit."""
        if self._reserve_lanes():
            self._to_lanes(0, requests)
            self.is_placed = False

    def _start_loose(self) -> None:
        """Use lanes that grow, if lanes of full length for all rows never fit."""
        models = self._models
        # A batch-invariant pass on CUDA does not take a view like this.
        if self._lane or not models.policy.arithmetic.has_loose_lanes:
            return
        if self._scheduler.use_loose_lanes(self._draft_slots):
            self._loose = LooseLanes(self._cache, self._scheduler)
            models.bind_lanes(0)

    def _to_lanes(self, first_row: int, requests: Sequence[Request]) -> None:
        """Move the positions so far of requests to the lanes from `first_row` on.

        Free the pages where they were, and prompts that no waiting sibling needs.
        """
        cache, device = self._cache, self._cache.device
        sources, targets = [], []
        for row, request in enumerate(requests, first_row):
            start = row * self._lane
            sources.append(cache.sequence_slots(request.kv, request.position))
            targets.append(torch.arange(start, start + request.position, device=device))
        source_S, target_S = torch.cat(sources), torch.cat(targets)
        for request in requests:
            cache.free(request.kv.pages)
        for state in {request.state for request in requests}:
            if state.num_running == state.num_unfinished:
                cache.free(state.pages)
        lane_pages = cache.pages_for(self._lane)
        for row, request in enumerate(requests, first_row):
            request.kv.prompt = None
            cache.take_lane(request.kv.pages, range(row * lane_pages, (row + 1) * lane_pages))
        cache.relocate(source_S, target_S)
        cache.mark_written(target_S)

    def _reserve_lanes(self) -> bool:
        """Reserve lanes as long as planned, which keeps captured graphs, or else as needed."""
        cache, graphs, scheduler = self._cache, self._models.graphs, self._scheduler
        needed = cache.pages_for(scheduler.longest_sequence + self._draft_slots)
        planned = cache.pages_for(graphs.plan.max_length) if graphs.has_graphs else 0
        for lane_pages in sorted({needed, max(needed, planned)}, reverse=True):
            if scheduler.reserve_lanes(lane_pages):
                break
        else:
            return False
        self._lane = lane_pages * cache.page_size
        self._models.bind_lanes(self._lane)
        return True
