"""Lanes that grow: one after another from the first slot on, each as long as its row needs now.

Lanes of full length for all rows need a multiple of the KV that the rows fill, because few
responses of a batch become long. Here every lane has room for its next step and an equal share of
the free pages. When a row has used its share up, all lanes are laid out anew. When the pages run
out, the newest row frees its own, as without lanes.
"""

from __future__ import annotations

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

    def is_short(self, requests: Sequence[Request]) -> bool:
        """Whether a row has no lane, or one that is too short for its next step."""
        needed = self._scheduler.step_pages
        return any(
            r.kv.prompt is not None or len(r.kv.pages) < needed(r.position) for r in requests
        )

    def lengthen(self) -> list[Request]:
        """Lay out the lanes of the running requests anew. Return the requests preempted for it."""
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
        most = [scheduler.step_pages(r.state.num_tokens + r.max_new_tokens) for r in rows]
        sizes = [min(n + share, m) for n, m in zip(needed, most, strict=True)]
        self._lay_out(rows, sizes, freed)
        return preempted

    def _lay_out(
        self, rows: Sequence[Request], sizes: Sequence[int], freed: Sequence[list[int]]
    ) -> None:
        """Move the rows to lanes of these sizes, in this order, and free the pages that they and
        their prompts were in.
        """
        cache = self._cache
        lanes: list[range] = []
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        end = 0
        for request, size in zip(rows, sizes, strict=True):
            lane = range(end, end + size)
            end = lane.stop
            lanes.append(lane)
            if request.kv.prompt is None and request.kv.pages[0] == lane.start:
                continue
            start = lane.start * cache.page_size
            sources.append(cache.sequence_slots(request.kv, request.position))
            targets.append(torch.arange(start, start + request.position, device=cache.device))
        for pages in freed:
            cache.free(pages)
        source_S, target_S = cache.clear_below(end)
        if sources or source_S.numel():
            cache.relocate(torch.cat((source_S, *sources)), torch.cat((target_S, *targets)))
        for request, lane in zip(rows, lanes, strict=True):
            request.kv.prompt = None
            cache.take_lane(request.kv.pages, lane)
