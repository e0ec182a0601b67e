"""Where the rows of the running batch have their KV: all in pages, or each in a lane.

A lane is the contiguous range of KV slots of one row, prompt included. All lanes are read at the
length of the longest row, pages only at their row's length. Speculation and captured graphs need
lanes. Rows start in pages. They move to lanes once, when lanes for all requests fit and cost
little. The decode batch calls this class when rows join, leave or need a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_megatron.engines.embedded.graph_plan import EagerReason, Role
from tlt_megatron.engines.embedded.graph_pool import (
    GraphPool,
    PassInputs,
    addresses_read,
    lane_steps,
)
from tlt_megatron.engines.embedded.scheduler import Request, Scheduler
from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer

_LANE_WASTE = 1.25  # rows move to lanes if these cost at most this factor more
_LANE_FREE_POSITIONS = 512  # cost of merging pages, in positions of attention


class KvLayout:
    """The KV of the rows of one batch. Row b of every argument is the b-th running request."""

    def __init__(
        self,
        model: Transformer,
        cache: KvCache,
        graphs: GraphPool,
        *,
        draft: DraftInference | None,
        draft_slots: int,
    ) -> None:
        """A speculative step may write `draft_slots` slots after a sequence."""
        self._model = model
        self._cache = cache
        self._graphs = graphs
        self._draft = draft
        self._draft_slots = draft_slots
        self._paged = model.arithmetic.paged(cache)
        self._lane = 0  # slots of a lane; 0 while rows are in pages
        self._view: LaneView | None = None  # of the current rows
        self._longest = 0  # positions of the longest row
        # Number of the decode pass that needs the next page: of each request in pages, and of all.
        self._due: dict[Request, int] = {}
        self._next_due = 0
        self.is_placed = False  # whether `place` has run since rows joined, left or took a page

    @property
    def has_lanes(self) -> bool:
        return self._lane > 0

    # ---- rows join and leave

    def join(self, first_row: int, requests: Sequence[Request], num_passes: int) -> None:
        """Add new rows. In pages, `num_passes` decode passes have run."""
        if self._lane:
            assert all(each.saved is None for each in requests), "preempted although all have lanes"
            self._to_lanes(first_row, requests, [each.state.num_tokens for each in requests])
            return
        for request in requests:
            room = len(request.kv.pages) * self._cache.page_size - request.num_saved
            self._due[request] = num_passes + room

    def leave(self, requests: Sequence[Request], kept: Sequence[int], positions_B: Tensor) -> None:
        """Keep only the rows `kept`, in this order. In lanes, move those whose row changes."""
        moves = [(row, old) for row, old in enumerate(kept) if row != old]
        if not self._lane or not moves:
            return
        cache, lane, positions = self._cache, self._lane, positions_B.tolist()
        for row, old in moves:
            request = requests[old]
            source_S = torch.arange(old * lane, old * lane + positions[old], device=cache.device)
            target_S = source_S + (row - old) * lane
            cache.free(request.kv.pages)
            self._fill_lane(row, request)
            cache.relocate(source_S, target_S)
            cache.mark_written(target_S)

    def set_changed(self, requests: Sequence[Request]) -> None:
        """Note that the rows are now these."""
        self.is_placed = False
        self._view = None
        self._next_due = min((self._due.get(request, 0) for request in requests), default=0)

    def grow(
        self, requests: Sequence[Request], num_passes: int, scheduler: Scheduler
    ) -> set[Request]:
        """Take a page for each row whose next token starts one. Return the requests preempted."""
        preempted: set[Request] = set()
        if self._lane or num_passes < self._next_due:
            return preempted
        due = [request for request in requests if self._due[request] == num_passes]
        for request in sorted(due, key=lambda request: request.order):
            if request not in preempted:
                preempted.update(scheduler.grow(request))
                self._due[request] += self._cache.page_size
        self.set_changed([request for request in requests if request not in preempted])
        return preempted

    # ---- one pass

    def place(
        self, requests: Sequence[Request], positions: list[int], scheduler: Scheduler
    ) -> list[int]:
        """Choose pages or lanes. Return the slot of each row's next token, at `positions`."""
        self._longest = max(positions)
        if not self._lane and (
            self._graphs.has_graphs  # graphs save more than pages do
            or (not scheduler.has_waiting and self._lanes_pay(requests, positions))
        ):
            self.move_to_lanes(requests, positions, scheduler)
        self.is_placed = True
        if self._lane:
            return [row * self._lane + position for row, position in enumerate(positions)]
        cache = self._cache
        cache.compact()
        self._paged.rebuild([request.kv for request in requests])
        return [
            request.kv.pages[-1] * cache.page_size
            + (position - request.kv.num_prompt) % cache.page_size
            for request, position in zip(requests, positions, strict=True)
        ]

    def run(self, token_ids_B: Tensor, positions_B: Tensor, slots_B: Tensor) -> tuple[Tensor, ...]:
        """Run one token of every row through the model. Return its hidden states and features."""
        self._longest += 1
        if not self._lane:
            self._paged.begin_step(slots_B, positions_B)
            self._graphs.count_eager(Role.TARGET, EagerReason.PAGES)
            return self._model.forward_tapped(
                token_ids_B, positions_B, self._paged, self._cache.tap_layers
            )
        self._cache.mark_written(slots_B)
        view = self.view(token_ids_B.shape[0])
        inputs = PassInputs(
            token_ids_P=token_ids_B,
            positions_P=positions_B,
            slots_P=slots_B,
            bias_BRS=view.committed_bias(view.read_length(self._longest)),
        )
        return self._graphs.run(Role.TARGET, inputs)

    def view(self, num_rows: int) -> LaneView:
        if self._view is None:
            self._view = LaneView(self._cache, num_rows=num_rows, lane=self._lane)
        return self._view

    def advance(self, num_tokens: int) -> None:
        """Note that a speculative step added at most `num_tokens` to a row."""
        self._longest += num_tokens

    # ---- lanes

    def _lanes_pay(self, requests: Sequence[Request], positions: list[int]) -> bool:
        """Whether it costs plain decoding little to pad every row to the longest."""
        num_pages = sum(len(request.kv.pages) for request in requests)
        num_pages += sum(len(state.pages) for state in {request.state for request in requests})
        limit = _LANE_WASTE * num_pages * self._cache.page_size + _LANE_FREE_POSITIONS
        return len(positions) * max(positions) <= limit

    def move_to_lanes(
        self, requests: Sequence[Request], positions: list[int], scheduler: Scheduler
    ) -> None:
        """Move all rows to lanes of full length, if those of all requests fit."""
        if self._reserve_lanes(scheduler):
            self._to_lanes(0, requests, positions)
            self.is_placed = False

    def _to_lanes(
        self, first_row: int, requests: Sequence[Request], positions: Sequence[int]
    ) -> None:
        """Move the positions so far of requests in pages to the lanes from `first_row` on.

        Free their pages, and prompts that no waiting sibling needs.
        """
        cache, device = self._cache, self._cache.device
        sources, targets = [], []
        for row, (request, position) in enumerate(zip(requests, positions, strict=True), first_row):
            start = row * self._lane
            sources.append(cache.sequence_slots(request.kv, position))
            targets.append(torch.arange(start, start + position, device=device))
        source_S, target_S = torch.cat(sources), torch.cat(targets)
        for request in requests:
            cache.free(request.kv.pages)
        for state in {request.state for request in requests}:
            if state.num_running == state.num_unfinished:
                cache.free(state.pages)
        for row, request in enumerate(requests, first_row):
            self._fill_lane(row, request)
        cache.relocate(source_S, target_S)
        cache.mark_written(target_S)

    def _fill_lane(self, row: int, request: Request) -> None:
        """Take all pages of lane `row`, which no other request uses."""
        request.kv.prompt = None
        lane_pages = self._cache.pages_for(self._lane)
        for page in range(row * lane_pages, (row + 1) * lane_pages):
            self._cache.take_response_page(request.kv.pages, at=page)

    def _reserve_lanes(self, scheduler: Scheduler) -> bool:
        """Reserve lanes as long as planned, which keeps captured graphs, or else as needed."""
        cache, graphs = self._cache, self._graphs
        needed = cache.pages_for(scheduler.longest_sequence + self._draft_slots)
        planned = cache.pages_for(graphs.plan.max_length) if graphs.has_graphs else 0
        for lane_pages in sorted({needed, max(needed, planned)}, reverse=True):
            if scheduler.reserve_lanes(lane_pages):
                break
        else:
            return False
        self._lane = lane_pages * cache.page_size
        graphs.bind(
            lane_steps(self._model, cache, self._lane, self._draft),
            addresses_read(self._model, cache, self._draft),
            lane=self._lane,
            num_lanes=cache.num_pages // lane_pages,
            scratch_slot=cache.scratch_slot,
        )
        return True
