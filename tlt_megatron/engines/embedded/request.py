"""A response to generate, its prompt, and where both of them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from tlt_megatron.models.kv_cache import SequenceKv
from tlt_megatron.speculation.ngram import IndexedText
from tlt_megatron.speculation.sampling import request_seed
from tlt_megatron.stop_strings import StopStrings
from tlt_megatron.types import Prompt, SamplingParams

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
    stop: StopStrings | None = None
    stop_state: bytes | None = b""  # of `stop`, after the tokens so far
    num_reported: int = 0  # tokens that `DecodeBatch.take_news` has returned

    @property
    def sample_index(self) -> int:
        return self.key[1]

    @property
    def num_saved(self) -> int:
        """Return the number of tokens generated before preemption."""
        return 0 if self.saved is None else self.saved.token_ids_T.numel()

    def read(self, token_ids: Sequence[int]) -> int:
        """Look for stop strings in new tokens. Return how many belong to the response."""
        if self.stop is None:
            return len(token_ids)
        count, self.stop_state = self.stop.run(self.stop_state, token_ids)
        return count

    @property
    def has_stop_string(self) -> bool:
        """Whether a stop string has ended the response."""
        return self.stop_state is None

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
        stop = prompt.stop_in(params)
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
                    stop=stop,
                    stop_state=b"" if stop is None else stop.start,
                )
            )
    return requests


@dataclass(slots=True, kw_only=True, eq=False)
class KeptTurn:
    """A complete response whose KV is kept, in prompt pages, for the prompt that continues it."""

    token_ids: tuple[int, ...]  # prompt and response without its last token, which has no KV
    pages: list[int] = field(default_factory=list)
