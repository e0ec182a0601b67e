"""Chooses which requests run: continuous batching over a KV budget, first come first served,
independent of time.

Pages are taken as responses grow and are not reserved. When they run out, the newest
running request frees its pages and is recomputed later, so the oldest always makes progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from tlt_megatron.models.kv_cache import KvCache, SequenceKv
from tlt_megatron.speculation.ngram import IndexedText
from tlt_megatron.speculation.sampling import request_seed
from tlt_megatron.types import Prompt, RolloutKey, SamplingParams

ResponseKey = tuple[str, int]  # prompt_id and sample_index


@dataclass(slots=True, kw_only=True, eq=False)
class PromptState:
    """A prompt and its prefill progress. Its KV stays while a sibling runs, and if memory allows
    while one waits.
    """

    prompt: Prompt
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    # The state of its last token, from which siblings sample their first token.
    last_hidden_D: Tensor | None = None
    num_running: int = 0
    num_unfinished: int = 0  # running and waiting siblings

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)


class DrawnTokens(NamedTuple):
    """The tokens of a response so far, on the CPU."""

    token_ids_T: Tensor  # int64
    logprobs_T: Tensor  # float32
    policy_logprobs_T: Tensor  # float32


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A response to generate. The decode batch has its tokens while it runs, `saved` in between."""

    order: int  # position in the queue of all requests; lower is older
    key: ResponseKey
    state: PromptState
    params: SamplingParams
    seed: int
    max_new_tokens: int
    kv: SequenceKv
    saved: DrawnTokens | None = None
    position: int = 0  # the next token to compute, counted in the whole sequence, while it runs
    num_computed: int = 0  # saved tokens recomputed so far
    last_hidden_D: Tensor | None = None  # the state of the last saved token, after recomputation
    passes: list[tuple[int, int]] = field(default_factory=list)  # verifying: tokens before, out
    # the ids that top-p and top-k kept at each token so far; empty without them
    kept: list[Tensor] = field(default_factory=list)
    text: IndexedText | None = None  # what the n-gram drafter has of it
    num_reported: int = 0  # tokens that `DecodeBatch.take_news` has returned

    @property
    def sample_index(self) -> int:
        return self.key[1]

    @property
    def num_saved(self) -> int:
        """Return the number of tokens generated before preemption."""
        return 0 if self.saved is None else self.saved.token_ids_T.numel()

    @property
    def is_computed(self) -> bool:
        """Whether the KV of prompt and saved tokens is complete, so that it can join the batch."""
        is_prompt_computed = self.state.num_computed == self.state.num_tokens
        return is_prompt_computed and self.num_computed == self.num_saved


def longest_of(requests: Sequence[Request]) -> int:
    """Return the most positions of running requests, that of the next token included."""
    return max(request.position for request in requests) + 1


class PrefillChunk(NamedTuple):
    """Tokens start..end-1 of a prompt, or of the saved tokens of a preempted request."""

    owner: PromptState | Request
    start: int
    end: int


def make_requests(
    prompts: Sequence[Prompt], params: SamplingParams, *, first_order: int = 0
) -> list[Request]:
    """Return the requests of prompts, siblings together."""
    requests: list[Request] = []
    for prompt in prompts:
        samples = prompt.sample_indices(params)
        state = PromptState(prompt=prompt, num_unfinished=len(samples))
        for sample_index in samples:
            requests.append(
                Request(
                    order=first_order + len(requests),
                    key=(prompt.prompt_id, sample_index),
                    state=state,
                    params=params,
                    seed=request_seed(
                        params.seed, prompt.draw_index, sample_index, prompt.first_position
                    ),
                    max_new_tokens=prompt.limit(params),
                    kv=SequenceKv(num_prompt=state.num_tokens, prompt=state.pages),
                )
            )
    return requests


@dataclass(slots=True, kw_only=True, eq=False)
class KeptTurn:
    """A complete response whose KV is kept, in prompt pages, for the prompt that continues it."""

    token_ids: tuple[int, ...]  # prompt and response without its last token, which has no KV
    pages: list[int] = field(default_factory=list)


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
        self._lanes_end = 0  # pages of all lanes; 0 without lanes
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
        known = (request.state.num_tokens + request.max_new_tokens for request in everyone)
        return max(self._longest_later, *known)

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self.running

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests behind all others. ValueError if one is longer than announced."""
        for request in requests:
            needed = request.state.num_tokens + request.max_new_tokens
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
                if self._drop_kept_turn() or (not self.running and self._reclaim()):
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
        cache, prompt_pages, own_pages = self._cache, request.state.pages, request.kv.pages
        num_prompt = cache.pages_for(request.state.num_tokens) - len(prompt_pages)
        num_own = cache.pages_for(request.num_saved + 1) - len(own_pages)
        if self._lanes_end:
            # it gets its lane when it joins; a page taken now could lie in another lane
            num_own = 0
        if num_prompt + num_own > self._num_spare:
            return False
        cache.take_prompt_pages(prompt_pages, num_prompt)
        for _ in range(num_own):
            cache.take_response_page(own_pages)
        return True

    @property
    def _num_spare(self) -> int:
        """Return the free pages beside the lanes, or without lanes all but one for each running
        request, which would else preempt another soon."""
        num_free = self._cache.num_free_from(self._lanes_end)
        return num_free if self._lanes_end else num_free - len(self.running)

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
            if self._reclaim():
                continue
            victim = self.running.pop()
            self._release(victim)
            self._waiting.appendleft(victim)
            self.num_preemptions += 1
            preempted.append(victim)
            if victim is request:
                break
        return preempted

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

    def _reclaim(self) -> bool:
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
        is_last = len(token_ids) == request.max_new_tokens
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
