"""Lanes that grow: they start at any page, and each is as long as its row needs now.

Lanes of full length for all rows need a multiple of the KV that the rows fill, because few
responses of a batch become long. Here every lane has room for its next step and a share of the free
pages. A row that joins, or has used its share up, moves into a gap. Without a gap that is long
enough, all lanes are laid out anew. When the pages run out, the newest row frees its own, as
without lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_megatron.engines.embedded.request import Request
from tlt_megatron.engines.embedded.scheduler import MIN_SPARE, Scheduler
from tlt_megatron.models.kv_cache import KvCache


class LooseLanes:
    """The lanes of the running requests of a scheduler."""

    def __init__(self, cache: KvCache, scheduler: Scheduler) -> None:
        """`scheduler` has agreed: see its `use_loose_lanes`."""
        self._cache = cache
        self._scheduler = scheduler

    def find_short(self, requests: Sequence[Request]) -> list[Request]:
        """Return the rows that have no lane, or one that is too short for their next step."""
        needed = self._scheduler.step_pages
        return [
            r for r in requests if r.kv.prompt is not None or len(r.kv.pages) < needed(r.position)
        ]

    def lengthen(self, short: Sequence[Request]) -> list[Request]:
        """Give rows longer lanes. Return the requests preempted for it."""
        if all(self._moves_to_gap(request) for request in short):
            return []
        return self._lay_out_all()

    def _moves_to_gap(self, request: Request) -> bool:
        """Move one row to a lane among the free pages. Return False if none is long enough."""
        cache, scheduler, state = self._cache, self._scheduler, request.state
        num_free = cache.num_free - scheduler.num_pages_of_next()
        share = max(num_free // (2 * len(scheduler.running)), MIN_SPARE)
        most = scheduler.step_pages(state.num_tokens + request.end.max_new_tokens)
        lane = cache.find_free(min(scheduler.step_pages(request.position) + share, most))
        if lane is None:
            return False
        in_prompt = [r for r in scheduler.running if r.state is state and r.kv.prompt is not None]
        freed = [request.kv.pages]
        if in_prompt == [request] and state.num_running == state.num_unfinished:
            freed.append(state.pages)
        self._move([request], [lane], freed)
        return True

    def _lay_out_all(self) -> list[Request]:
        """Lay out the lanes of the running requests anew, one after another from the first slot on.
        Return the requests preempted for it.
        """
        preempted: list[Request] = []
        cache, scheduler = self._cache, self._scheduler
        while True:
            rows = sorted(
                scheduler.running,
                key=lambda r: r.kv.pages[0] if r.kv.prompt is None else cache.num_pages,
            )
            shared = {r.state for r in rows if r.state.num_running == r.state.num_unfinished}
            freed = [*(r.kv.pages for r in rows), *(state.pages for state in shared)]
            needed = [scheduler.step_pages(r.position) for r in rows]
            spare = cache.num_free + sum(map(len, freed)) - sum(needed)
            if spare >= MIN_SPARE * len(rows) or (len(rows) == 1 and spare >= 0):
                break
            if not scheduler.reclaim():
                preempted.append(scheduler.preempt_newest())
        reserved = scheduler.num_pages_of_next()
        if spare - reserved >= MIN_SPARE * len(rows):
            spare -= reserved
        share = spare // len(rows)
        most = [scheduler.step_pages(r.state.num_tokens + r.end.max_new_tokens) for r in rows]
        sizes = [min(n + share, m) for n, m in zip(needed, most, strict=True)]
        ends = list(itertools.accumulate(sizes))
        lanes = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._move(rows, lanes, freed)
        return preempted

    def _move(
        self, rows: Sequence[Request], lanes: Sequence[range], freed: Sequence[list[int]]
    ) -> None:
        """Move rows to lanes. Free the pages that they and their prompts were in, and move whatever
        else is in the lanes.
        """
        cache = self._cache
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for request, lane in zip(rows, lanes, strict=True):
            if request.kv.prompt is None and request.kv.pages[0] == lane.start:
                continue
            start = lane.start * cache.page_size
            sources.append(cache.sequence_slots(request.kv, request.position))
            targets.append(torch.arange(start, start + request.position, device=cache.device))
        for pages in freed:
            cache.free(pages)
        source_S, target_S = cache.clear(lanes[0].start, lanes[-1].stop)
        if sources or source_S.numel():
            cache.relocate(torch.cat((source_S, *sources)), torch.cat((target_S, *targets)))
        for request, lane in zip(rows, lanes, strict=True):
            request.kv.prompt = None
            cache.take_lane(request.kv.pages, lane)
