"""The KV cache of all running requests: one allocation, divided into pages of equal size.

Prompt pages are shared by all siblings and come from the top of the pool. Response pages belong to
one sequence and come from the bottom. Both ends stay dense, so one batched attention serves all
sequences without copying or padding (see `PagedAttention`).
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_megatron.models.config import ModelConfig

_FREE, _RESPONSE, _PROMPT = 0, 1, 2
# An end is compacted when its free pages exceed _MIN_HOLES and this share of its used pages.
_MAX_HOLES = 0.25
_MIN_HOLES = 8


@dataclass(slots=True, kw_only=True)
class SequenceKv:
    """The pages of one sequence: those of its prompt, a list that its siblings share, then its own.

    In lanes (see `attention.lanes.LaneView`) `prompt` is None, and `pages` holds prompt and
    response together.
    """

    num_prompt: int  # positions
    prompt: list[int] | None
    pages: list[int] = field(default_factory=list)


class KvCache:
    """The pool of KV slots T: page p holds the page_size slots from p * page_size on."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_draft_layers: int = 0,
        tap_layers: tuple[int, ...] | None = None,
        has_scratch: bool = False,
    ) -> None:
        """Allocate the pool.

        `num_draft_layers` adds layers after the target's, for a drafter with the same heads. Unless
        `tap_layers` is None, a slot also holds its token, the target's last state, and the states
        after these layers. `has_scratch` adds a page after all others, which padded passes write
        to.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = config.num_kv_heads
        self.num_heads_per_kv = config.num_heads // config.num_kv_heads
        num_slots = (num_pages + has_scratch) * page_size
        num_layers = config.num_layers + num_draft_layers
        shape = num_layers, 2 * config.num_kv_heads, num_slots, config.head_dim
        # Zeros, not empty: a masked position still adds 0 * value, which must not be 0 * nan.
        self.kv_LKTH = _zeros(shape, dtype, device)
        self.bias_T = torch.full((num_slots,), -torch.inf, dtype=dtype, device=device)
        self.layers = list(self.kv_LKTH.unbind(0))
        self.tap_layers = tap_layers or ()
        kept = 0 if tap_layers is None else num_slots
        feature_size = config.hidden_size * (1 + len(self.tap_layers))
        self.features_TD = _zeros((kept, feature_size), dtype, device)
        # One more slot: the token after the last lane's last position is written, but never read.
        self.token_ids_T = torch.zeros(kept + bool(kept), dtype=torch.int64, device=device)
        self.routes_TR = torch.zeros(num_slots, 0, dtype=torch.int16, device=device)
        self.reset()

    def keep_routes(self, num_routes: int) -> None:
        """Let a slot also hold so many experts of its token, in all layers."""
        shape = self.routes_TR.shape[0], num_routes
        self.routes_TR = _zeros(shape, torch.int16, self.routes_TR.device)

    @property
    def device(self) -> torch.device:
        return self.bias_T.device

    @property
    def scratch_slot(self) -> int:
        """Return the slot after all pages that padded queries write to, if there is a scratch
        page.
        """
        return self.num_pages * self.page_size

    @property
    def has_routes(self) -> bool:
        return self.routes_TR.numel() > 0

    @property
    def has_features(self) -> bool:
        return self.token_ids_T.numel() > 0

    def reset(self) -> None:
        """Free every page."""
        self._state = bytearray(self.num_pages)
        self._holder: list[list[int] | None] = [None] * self.num_pages
        self.num_free = self.num_pages

    # ---- taking and freeing pages

    def take_response_page(self, pages: list[int]) -> bool:
        """Append the lowest free page. Return False if none is free."""
        page = self._state.find(_FREE)
        if page < 0:
            return False
        self._take(range(page, page + 1), _RESPONSE, pages)
        return True

    def take_lane(self, pages: list[int], lane: range) -> None:
        """Append these pages, which must be free."""
        self._take(lane, _RESPONSE, pages)

    def take_prompt_pages(self, pages: list[int], count: int) -> bool:
        """Append `count` pages from the top. If fewer are free, take none and return False."""
        if count > self.num_free:
            return False
        for _ in range(count):
            page = self._state.rfind(_FREE)
            self._take(range(page, page + 1), _PROMPT, pages)
        return True

    def num_free_from(self, page: int) -> int:
        """Return the number of free pages from `page` on."""
        return self._state.count(_FREE, page)

    def _take(self, taken: range, state: int, pages: list[int]) -> None:
        for page in taken:
            assert self._state[page] == _FREE, f"page {page} is taken already"
            self._state[page] = state
            self._holder[page] = pages
        pages += taken
        self.bias_T[taken.start * self.page_size : taken.stop * self.page_size].fill_(-torch.inf)
        self.num_free -= len(taken)

    def free(self, pages: list[int]) -> None:
        """Free all of `pages` and empty the list."""
        for page in pages:
            assert self._state[page] != _FREE, f"page {page} is free already"
            self._state[page] = _FREE
            self._holder[page] = None
        self.num_free += len(pages)
        pages.clear()

    def pass_on(self, pages: list[int], target: list[int]) -> None:
        """Move all of `pages` to another list."""
        for page in pages:
            self._holder[page] = target
        target += pages
        pages.clear()

    def pages_for(self, num_positions: int) -> int:
        """Return the number of pages for `num_positions` positions."""
        return -(-num_positions // self.page_size)

    # ---- the two ends

    @property
    def response_end(self) -> int:
        """Return one past the highest response page."""
        return self._state.rfind(_RESPONSE) + 1

    @property
    def prompt_start(self) -> int:
        """Return the lowest prompt page; num_pages if there is none."""
        page = self._state.find(_PROMPT)
        return page if page >= 0 else self.num_pages

    def compact(self) -> bool:
        """Move pages toward the two ends of the pool if many pages between them are free.

        Changes the lists that hold the pages in place. Returns whether a page moved.
        """
        moves: list[tuple[int, int]] = []
        for state in (_RESPONSE, _PROMPT):
            count = self._state.count(state)
            inner, outer = range(count), range(count, self.response_end)  # the end, and beyond it
            if state == _PROMPT:
                border = self.num_pages - count
                inner, outer = range(border, self.num_pages), range(self.prompt_start, border)
            if len(outer) > max(_MIN_HOLES, _MAX_HOLES * count):
                sources = [page for page in outer if self._state[page] == state]
                holes = [page for page in inner if self._state[page] == _FREE]
                moves += zip(sources, holes, strict=False)
        if not moves:
            return False
        for source, target in moves:
            self._move(source, target)
        sources, targets = zip(*moves, strict=True)
        self.relocate(self._slots(list(sources)), self._slots(list(targets)))
        return True

    def find_free(self, count: int) -> range | None:
        """Return the lowest `count` free pages that follow each other."""
        start = self._state.find(bytes([_FREE]) * count)
        return range(start, start + count) if start >= 0 else None

    def clear(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Give the holders of pages from `start` to `end` free pages above them in their place.
        Return the slots to copy and their targets, for `relocate`. Enough pages must be free from
        `end` on.
        """
        sources = [page for page in range(start, end) if self._state[page] != _FREE]
        targets: list[int] = []
        for _ in sources:
            target = self._state.rfind(_FREE, end)
            assert target >= 0, "no page is free above the lanes"
            self._state[target] = _PROMPT  # until the loop below
            targets.append(target)
        for source, target in zip(sources, targets, strict=True):
            self._move(source, target)
        return self._slots(sources), self._slots(targets)

    def _move(self, source: int, target: int) -> None:
        """Change the page of a holder."""
        holder = self._holder[source]
        assert holder is not None
        holder[holder.index(source)] = target
        self._state[target], self._state[source] = self._state[source], _FREE
        self._holder[target], self._holder[source] = holder, None

    # ---- slots and data

    def _slots(self, pages: list[int]) -> Tensor:
        starts = torch.tensor(pages, dtype=torch.int64, device=self.device) * self.page_size
        return (starts.unsqueeze(1) + torch.arange(self.page_size, device=self.device)).flatten()

    def slots(self, pages: list[int], start: int, end: int) -> Tensor:
        """Return the slots of positions start..end-1 in `pages`, [end - start] int64."""
        first = start // self.page_size
        offset = first * self.page_size
        return self._slots(pages[first : self.pages_for(end)])[start - offset : end - offset]

    def sequence_slots(self, sequence: SequenceKv, num_positions: int) -> Tensor:
        """Return the slots of the first positions of prompt and response."""
        if sequence.prompt is None:
            return self.slots(sequence.pages, 0, num_positions)
        own = self.slots(sequence.pages, 0, num_positions - sequence.num_prompt)
        return torch.cat((self.slots(sequence.prompt, 0, sequence.num_prompt), own))

    def write(self, layer: int, slots_P: Tensor, kv_PKH: Tensor) -> None:
        """Store keys and values of packed tokens."""
        self.layers[layer].index_copy_(1, slots_P, kv_PKH.transpose(0, 1))

    def mark_written(self, slots_P: Tensor) -> None:
        """Make slots visible to queries."""
        self.bias_T.index_fill_(0, slots_P, 0.0)

    def keep_features(self, slots_P: Tensor, features_PD: Tensor, token_ids_P: Tensor) -> None:
        """Store the drafter's inputs of packed tokens, if the pool has them."""
        if self.has_features:
            self.features_TD.index_copy_(0, slots_P, features_PD)
            self.token_ids_T.index_copy_(0, slots_P, token_ids_P)

    def move_kv(self, source_S: Tensor, target_S: Tensor) -> None:
        """Copy only keys and values to other slots, which may overlap. For few slots."""
        self.kv_LKTH.index_copy_(2, target_S, self.kv_LKTH.index_select(2, source_S))

    def relocate(self, source_S: Tensor, target_S: Tensor) -> None:
        """Copy slots to other slots, which may overlap, by way of a copy of one layer at a time."""
        for layer in self.layers:
            layer.index_copy_(1, target_S, layer.index_select(1, source_S))
        # Features of a slot may be as large as several layers.
        width = self.layers[0].shape[0] * self.layers[0].shape[2]
        features = (*self.features_TD.split(width, dim=1), self.token_ids_T)
        routes = (self.routes_TR,) if self.has_routes else ()
        for tensor in (self.bias_T, *(features if self.has_features else ()), *routes):
            tensor.index_copy_(0, target_S, tensor.index_select(0, source_S))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU they take neither time nor memory before they are written to."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    room = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=dtype).view(shape)
