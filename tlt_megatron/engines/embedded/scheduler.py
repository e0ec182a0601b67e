"""Which requests run: continuous batching over a KV budget, first come first served, without clocks.

Called by the engine's loop: `plan_prefill` says what to compute before the next decode pass and whom to admit,
`grow` finds pages for running requests. What to know: pages are taken as responses grow, nothing is reserved; when they
run out the newest running request gives its pages back and is computed again later, so the oldest always moves on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tlt_megatron.models.kv_cache import KvCache, PromptKv, SequenceKv
from tlt_megatron.speculation.ngram import IndexedText
from tlt_megatron.speculation.sampling import request_seed
from tlt_megatron.types import Prompt, SamplingParams


@dataclass(slots=True, kw_only=True, eq=False)
class PromptState:
    """A prompt and what is computed of it. Its KV stays while a sibling runs or, memory permitting, waits."""

    prompt: Prompt
    kv: PromptKv = field(default_factory=PromptKv)
    num_computed: int = 0
    num_ever_computed: int = 0  # tokens below this are recomputed, not new
    last_hidden_D: Tensor | None = (
        None  # of its last token: siblings draw their first token from it
    )
    num_running: int = 0
    num_unfinished: int = 0  # siblings that run or wait

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt.token_ids)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One response to be made. Generated tokens live in the decode batch while it runs, in `saved` while it waits."""

    order: int  # position in the queue of all requests; lower is older
    state: PromptState
    sample_index: int
    seed: int
    max_new_tokens: int
    kv: SequenceKv
    saved: tuple[Tensor, Tensor, Tensor] | None = None  # token_ids, logprobs, policy_logprobs
    num_computed: int = 0  # of the saved tokens, while it is being recomputed
    last_hidden_D: Tensor | None = None  # of the last saved token, once recomputed
    due: int = 0  # number of the decode pass that needs a new page
    num_drafted: int = 0  # positions that the learned drafter has seen
    text: IndexedText | None = None  # what the n-gram drafter has seen of it
    num_indexed: int = 0  # response tokens in `text`
    accept_lengths: list[int] = field(default_factory=list)

    @property
    def num_saved(self) -> int:
        """Tokens generated before it was preempted."""
        return 0 if self.saved is None else self.saved[0].numel()

    @property
    def num_kept(self) -> int:
        """Positions that its own pages hold when it joins the batch over pages."""
        return self.kv.num_copied + self.num_saved

    @property
    def is_computed(self) -> bool:
        """Whether the KV of its prompt and of its saved tokens is there, so that it can join the batch."""
        is_prompt_computed = self.state.num_computed == self.state.num_tokens
        return is_prompt_computed and self.num_computed == self.num_saved


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens start..end-1 of a prompt (`request` None) or of the saved tokens of a preempted request."""

    state: PromptState
    request: Request | None
    start: int
    end: int


def make_requests(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    max_new_tokens: Sequence[Sequence[int]] | None,
    *,
    aligned_to: int = 1,
) -> list[Request]:
    """All requests of a `generate` call, siblings together, in the order of the prompts.

    `max_new_tokens[prompt][sample]` limits single requests (benchmarks replay lengths); None: all have params' limit.
    Responses begin with a copy of what stands behind the last multiple of `aligned_to` positions of the prompt.
    """
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        state = PromptState(prompt=prompt, num_unfinished=params.num_samples)
        for sample_index in range(params.num_samples):
            limit = params.max_new_tokens
            if max_new_tokens is not None:
                limit = max_new_tokens[number][sample_index]
                if not 1 <= limit <= params.max_new_tokens:
                    raise ValueError(
                        f"max_new_tokens={limit} of prompt {prompt.prompt_id!r}: must be in"
                        f" [1, {params.max_new_tokens}]"
                    )
            requests.append(
                Request(
                    order=len(requests),
                    state=state,
                    sample_index=sample_index,
                    seed=request_seed(params.seed, prompt.draw_index, sample_index),
                    max_new_tokens=limit,
                    kv=SequenceKv(prompt=state.kv, num_copied=state.num_tokens % aligned_to),
                )
            )
    return requests


class Scheduler:
    """Waiting and running requests of one `generate` call and the pages they hold."""

    def __init__(
        self,
        requests: Sequence[Request],
        cache: KvCache,
        *,
        max_batch_size: int,
        prefill_chunk_tokens: int,
    ) -> None:
        self._waiting = deque(requests)
        self._cache = cache
        self._max_batch_size = max_batch_size
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._has_lanes = False
        self.running: list[Request] = []  # in order of age
        self.num_preemptions = 0

    @property
    def has_waiting(self) -> bool:
        """Whether any request is not admitted."""
        return bool(self._waiting)

    @property
    def longest_sequence(self) -> int:
        """Most positions that a request which runs or waits can come to."""
        everyone = (*self.running, *self._waiting)
        return max(request.state.num_tokens + request.max_new_tokens for request in everyone)

    @property
    def is_done(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self.running

    def reserve_lanes(self, lane_pages: int) -> bool:
        """Whether the lowest pages can be lanes for as many rows as may ever run, beside the prompts that wait to join
        them. If so, rows are admitted without asking for room from now on."""
        waiting = self._waiting
        if any(request.kv.pages or request.saved is not None for request in waiting):
            return False
        num_rows = min(self._max_batch_size, len(self.running) + len(waiting))
        end = num_rows * lane_pages
        stay = [page for request in waiting for page in request.state.kv.pages]
        # Prompts that join in one go, and one that is only partly in.
        longest = max((request.state.num_tokens for request in waiting), default=0)
        num_siblings = max((request.state.num_unfinished for request in waiting), default=1)
        num_prompts = min(-(-num_rows // num_siblings) + 1, len(waiting))
        if end + num_prompts * self._cache.pages_for(longest) > self._cache.num_pages:
            return False
        self._has_lanes = end <= min(stay, default=self._cache.num_pages)
        return self._has_lanes

    # ---- admission

    def plan_prefill(self) -> tuple[list[PrefillChunk], list[Request]]:
        """What one packed prefill pass computes, and the requests that can join the batch after it, oldest first."""
        chunks: list[PrefillChunk] = []
        admitted: list[Request] = []
        budget = self._prefill_chunk_tokens
        while self._waiting and len(self.running) < self._max_batch_size:
            request = self._waiting[0]
            if not self._has_room(request):
                # With nothing running it fits: those behind it hold no pages, as they came later or gave them back.
                assert self.running, "a request that was checked to fit does not"
                break
            self._take_pages(request)
            while budget and (chunk := self._next_chunk(request, budget)):
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
            if not request.is_computed:
                break  # the rest of it in the next pass
            self._waiting.popleft()
            request.state.num_running += 1
            self.running.append(request)
            admitted.append(request)
        return chunks, admitted

    def _pages_needed(self, request: Request) -> int:
        """Pages still to be taken before it can decode one token."""
        cache = self._cache
        needed = cache.pages_for(request.num_kept + 1) - len(request.kv.pages)
        if not request.state.kv.pages:
            needed += cache.pages_for(request.state.num_tokens)
        return needed

    def _has_room(self, request: Request) -> bool:
        # One free page is left for each that runs already, else the newcomer is the next to be preempted.
        needed = self._pages_needed(request)
        return self._has_lanes or needed <= self._cache.num_free - len(self.running)

    def _take_pages(self, request: Request) -> None:
        state, cache = request.state, self._cache
        if not state.kv.pages:
            cache.take_prompt_pages(state.kv.pages, cache.pages_for(state.num_tokens))
        if self._has_lanes:
            return  # its lane is given to it when it joins; a page of its own would lie in another's
        for _ in range(cache.pages_for(request.num_kept + 1) - len(request.kv.pages)):
            cache.take_response_page(request.kv.pages)

    @staticmethod
    def _next_chunk(request: Request, budget: int) -> PrefillChunk | None:
        """The next tokens to compute for a request, counted as computed: the pass follows at once."""
        state = request.state
        if state.num_computed < state.num_tokens:
            start = state.num_computed
            state.num_computed = min(start + budget, state.num_tokens)
            return PrefillChunk(state=state, request=None, start=start, end=state.num_computed)
        if request.num_computed < request.num_saved:
            start = request.num_computed
            request.num_computed = min(start + budget, request.num_saved)
            return PrefillChunk(state=state, request=request, start=start, end=request.num_computed)
        return None

    # ---- running

    def grow(self, request: Request) -> list[Request]:
        """Take one more page for a running request; returns those that were preempted for it (itself, at worst)."""
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
        """A running request ended: free its pages, and its prompt's after the last sibling."""
        self.running.remove(request)
        self._release(request)
        request.state.num_unfinished -= 1
        if request.state.num_unfinished == 0:
            self._drop_prompt(request.state)

    def _release(self, request: Request) -> None:
        self._cache.free(request.kv.pages)
        request.state.num_running -= 1
        request.num_computed = 0

    def _drop_prompt(self, state: PromptState) -> None:
        self._cache.free(state.kv.pages)
        state.num_computed = 0

    def _reclaim(self) -> bool:
        """Free what waiting requests hold: prompts without a running sibling, half recomputed responses."""
        is_any = False
        for request in self._waiting:
            if request.kv.pages:
                self._cache.free(request.kv.pages)
                request.num_computed = 0
                is_any = True
            state = request.state
            if state.kv.pages and state.num_running == 0:
                self._drop_prompt(state)
                is_any = True
        return is_any
