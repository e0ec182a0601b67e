"""Chooses which requests run: continuous batching over a KV budget, first come first served,
independent of time.

Pages are taken as responses grow and are not reserved. When they run out, the newest
running request frees its pages and is recomputed later, so the oldest always makes progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from tlt_megatron.engines.embedded.request import (
    KeptTurn,
    PrefillChunk,
    PromptState,
    Request,
    ResponseKey,
)
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.types import RolloutKey

MIN_SPARE = 2  # pages that a lane can grow by, or all would be laid out anew at every step


class Scheduler:
    """Waiting and running requests of one `generate` call and the pages they hold.

    While more requests may come, the KV of complete responses stays if memory allows. A prompt that
    continues one computes only the rest.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        cache: KvCache,
        *,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        longest_later: int = 0,
        is_serving: bool = False,
    ) -> None:
        """`longest_later`: most positions of a request that `add` brings; 0 if none comes.

        No more requests run at once than at the start, except with `is_serving`: then any number
        comes, and none continues another.
        """
        self._waiting = deque(requests)
        self._cache = cache
        self.max_batch_size = max_batch_size if is_serving else min(max_batch_size, len(requests))
        self._keeps_turns = not is_serving
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._longest_later = longest_later
        self._lanes_end = 0  # pages of all lanes of full length; 0 without them
        self._step_slots = 0  # see `use_loose_lanes`; 0 without loose lanes
        self._kept_turns: dict[RolloutKey, KeptTurn] = {}  # oldest first
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def longest_sequence(self) -> int:
        """Return the most positions that any running or waiting request can reach."""
        everyone = (*self.running, *self._waiting)
        known = (request.state.num_tokens + request.end.max_new_tokens for request in everyone)
        return max(self._longest_later, *known)

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self.running

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests behind all others. ValueError if one is longer than announced."""
        for request in requests:
            needed = request.state.num_tokens + request.end.max_new_tokens
            if needed > self._longest_later:
                raise ValueError(
                    f"prompt {request.state.prompt.prompt_id!r} and its response need {needed} positions: a later prompt"
                    f" may need at most {self._longest_later}"
                )
            self._continue_kept(request)
        self._waiting.extend(requests)

    def close(self) -> None:
        """Note that `add` will not be called again."""
        self._longest_later = 0
        while self._drop_kept_turn():
            pass

    def reserve_lanes(self, lane_pages: int) -> bool:
        """Reserve the lowest pages as lanes for all rows that may run. Return False if they and one
        waiting prompt do not fit. A lane is the contiguous range of KV slots of one row. With
        lanes, only prompts need free pages, beside the lanes. A prompt frees them when its last
        response has joined, so room for one is enough: prompts join one after another."""
        waiting, later = self._waiting, self._longest_later
        if any(request.kv.pages or request.saved is not None for request in waiting):
            return False
        num_rows = self.max_batch_size
        if not later:
            num_rows = min(num_rows, len(self.running) + len(waiting))
        end = num_rows * lane_pages
        stay = [page for request in waiting for page in request.state.pages]
        longest = max((request.state.num_tokens for request in waiting), default=0)
        if end + self._cache.pages_for(max(longest, later)) > self._cache.num_pages:
            return False
        if end > min(stay, default=self._cache.num_pages):
            return False
        while any(min(kept.pages) < end for kept in self._kept_turns.values()):
            self._drop_kept_turn()
        self._lanes_end = end
        return True

    def use_loose_lanes(self, draft_slots: int) -> bool:
        """Admit rows for lanes that grow: see `loose_lanes.py`. Return False if lanes of full
        length fit once no waiting request is in their way, or if not even the longest request fits
        alone.
        """
        cache, everyone = self._cache, (*self.running, *self._waiting)
        num_rows = self.max_batch_size if self._longest_later else len(everyone)
        longest = self.longest_sequence
        lane = cache.pages_for(longest + draft_slots)
        prompts = (request.state.num_tokens for request in everyone)
        prompt = cache.pages_for(max(self._longest_later, *prompts))
        if min(num_rows, self.max_batch_size) * lane + prompt <= cache.num_pages:
            return False
        # A step writes the root and its token, or `draft_slots` slots, and the token after them.
        if cache.pages_for(longest + draft_slots + 2) + MIN_SPARE + prompt > cache.num_pages:
            return False
        self._step_slots = draft_slots + 2
        return True

    def step_pages(self, num_positions: int) -> int:
        """Return the pages of a loose lane for the next step after so many positions."""
        return self._cache.pages_for(num_positions + self._step_slots)

    def num_pages_of_next(self) -> int:
        """Return the pages that the next request needs to join, with loose lanes."""
        if not self._waiting or len(self.running) == self.max_batch_size:
            return 0
        return sum(self._pages_needed(self._waiting[0]))

    # ---- admission

    def plan_prefill(self) -> tuple[list[PrefillChunk], list[Request]]:
        """Return the chunks of one packed prefill pass, and the requests that can join the batch
        after it, oldest first.
        """
        chunks: list[PrefillChunk] = []
        admitted: list[Request] = []
        budget = self._prefill_chunk_tokens
        while self._waiting and len(self.running) < self.max_batch_size:
            request = self._waiting[0]
            if not self._take_pages(request):
                if self._drop_kept_turn() or (not self.running and self.reclaim()):
                    continue
                # If nothing runs it fits: no other request holds pages.
                assert self.running, "a request that was checked to fit does not"
                break
            while budget and (chunk := self._next_chunk(request, budget)):
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
            if not request.is_computed:
                break  # the next pass computes the rest
            self._waiting.popleft()
            request.state.num_running += 1
            self.running.append(request)
            admitted.append(request)
        return chunks, admitted

    def _take_pages(self, request: Request) -> bool:
        """Take the pages that it still needs to decode one token. Return False if they are not
        free.
        """
        num_prompt, num_own = self._pages_needed(request)
        if num_prompt + num_own > self._num_spare:
            return False
        self._cache.take_prompt_pages(request.state.pages, num_prompt)
        if self._step_slots:
            num_own = self._cache.pages_for(request.num_saved) - len(request.kv.pages)
        for _ in range(num_own):
            self._cache.take_response_page(request.kv.pages)
        return True

    def _pages_needed(self, request: Request) -> tuple[int, int]:
        """Return the pages that must be free for its prompt, and for its response or lane."""
        cache, state, num_held = self._cache, request.state, len(request.kv.pages)
        num_prompt = cache.pages_for(state.num_tokens) - len(state.pages)
        if self._step_slots:
            lane = self.step_pages(state.num_tokens + request.num_saved) + MIN_SPARE
            return num_prompt, max(lane - num_held, 0)
        # With lanes it gets its own when it joins. A page taken now could lie in another one.
        return num_prompt, 0 if self._lanes_end else cache.pages_for(
            request.num_saved + 1
        ) - num_held

    @property
    def _num_spare(self) -> int:
        """Return the free pages beside the lanes, or without lanes all but one for each running
        request, which would else preempt another soon."""
        num_free = self._cache.num_free_from(self._lanes_end)
        has_lanes = self._lanes_end or self._step_slots
        return num_free if has_lanes else num_free - len(self.running)

    @staticmethod
    def _next_chunk(request: Request, budget: int) -> PrefillChunk | None:
        """Return the next tokens to compute for a request. They count as computed, because the pass
        follows at once.
        """
        totals = (request.state, request.state.num_tokens), (request, request.num_saved)
        for owner, num_tokens in totals:
            start = owner.num_computed
            if start < num_tokens:
                owner.num_computed = min(start + budget, num_tokens)
                return PrefillChunk(owner, start, owner.num_computed)
        return None

    # ---- running

    def grow(self, request: Request) -> list[Request]:
        """Take one more page for a running request. Return the requests preempted for it, possibly
        itself.
        """
        preempted: list[Request] = []
        while not self._cache.take_response_page(request.kv.pages):
            if self.reclaim():
                continue
            preempted.append(self.preempt_newest())
            if preempted[-1] is request:
                break
        return preempted

    def preempt_newest(self) -> Request:
        """Let the newest running request free its pages and wait. Return it."""
        victim = self.running.pop()
        self._release(victim)
        victim.kv.prompt = victim.state.pages
        if not victim.state.pages:  # freed when it moved to a lane
            victim.state.num_computed = 0
        self._waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim

    def finish(self, request: Request) -> None:
        """Free the pages of a request that ended, and those of its prompt after the last
        sibling.
        """
        self.running.remove(request)
        self._release(request)
        self._leave_prompt(request.state)

    def drop_waiting(self, keys: Collection[ResponseKey]) -> None:
        """Drop waiting requests, with their pages."""
        for request in [each for each in self._waiting if keys and each.key in keys]:
            self._waiting.remove(request)
            self._cache.free(request.kv.pages)
            self._leave_prompt(request.state)

    def _leave_prompt(self, state: PromptState) -> None:
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            self._drop_prompt(state)

    def _release(self, request: Request) -> None:
        self._cache.free(request.kv.pages)
        request.state.num_running -= 1
        request.num_computed = 0

    def _drop_prompt(self, state: PromptState) -> None:
        self._cache.free(state.pages)
        state.num_computed = 0

    def reclaim(self) -> bool:
        """Free kept turns, prompts without a running sibling and partly recomputed responses of
        waiting requests. Return if any was."""
        is_any = False
        while self._drop_kept_turn():
            is_any = True
        for request in self._waiting:
            if request.kv.pages:
                self._cache.free(request.kv.pages)
                request.num_computed = 0
                is_any = True
            state = request.state
            if state.pages and state.num_running == 0:
                self._drop_prompt(state)
                is_any = True
        return is_any

    # ---- turns of a conversation

    def keep_turn(self, request: Request, token_ids: Sequence[int]) -> None:
        """Keep the KV of a running request that is complete, if pages for a copy are free and a
        prompt may continue it.

        None continues a response that has all its tokens.
        """
        is_last = len(token_ids) == request.end.max_new_tokens
        if not self._longest_later or not self._keeps_turns or is_last:
            return
        cache, state = self._cache, request.state
        known = (*state.prompt.token_ids, *token_ids[:-1])
        needed = cache.pages_for(len(known))
        if needed > self._num_spare:
            return
        kept = KeptTurn(token_ids=known)
        cache.take_prompt_pages(kept.pages, needed)
        source_S = cache.sequence_slots(request.kv, len(known))
        cache.relocate(source_S, cache.slots(kept.pages, 0, len(known)))
        self._kept_turns[state.prompt.draw_index, request.sample_index] = kept

    def _continue_kept(self, request: Request) -> None:
        """Give a new request the KV of the turn that its prompt continues, if it was kept."""
        state = request.state
        kept = self._kept_turns.pop((state.prompt.draw_index, request.sample_index), None)
        if kept is None:
            return
        num_known = len(kept.token_ids)
        if state.prompt.token_ids[:num_known] == kept.token_ids and num_known < state.num_tokens:
            self._cache.pass_on(kept.pages, state.pages)
            state.num_computed = num_known
        else:
            self._cache.free(kept.pages)

    def drop_turn(self, key: RolloutKey) -> None:
        """Free the KV of the turn of `key` if it was kept."""
        if key in self._kept_turns:
            self._cache.free(self._kept_turns.pop(key).pages)

    def _drop_kept_turn(self) -> bool:
        """Free the oldest kept turn. Return False if there is none."""
        if not self._kept_turns:
            return False
        self.drop_turn(next(iter(self._kept_turns)))
        return True
