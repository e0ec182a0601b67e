"""The running batch of an `Engine`: jobs of any threads join it, and leave it alone.

One thread runs passes while there is work, and ends when there is none. So an engine that nobody
uses has no thread, and a pass never waits for a client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from tlt_megatron.api.response_text import ResponseText
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.request import DrawnTokens, ResponseKey
from tlt_megatron.engines.embedded.scoring import TokenScore
from tlt_megatron.engines.embedded.serving import NewRequests
from tlt_megatron.types import FinishReason, Prompt, SamplingParams

log = logging.getLogger(__name__)


class Response:
    """What there is of one response. Its lists only grow."""

    def __init__(self, prompt: Prompt, sample_index: int, text: ResponseText | None) -> None:
        """`text` None: nobody reads it before the end."""
        self.key: ResponseKey = prompt.prompt_id, sample_index
        self.prompt_index = prompt.draw_index
        self.prompt_ids = prompt.token_ids
        self.sample_index = sample_index
        self.text = text
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []  # under the sampled distribution
        self.policy_logprobs: list[float] = []  # at temperature 1, without a cut
        self.accept_lengths: list[int] = []
        self.finish_reason: FinishReason | None = None  # None: it goes on
        # for prompt and response, from the second token on, if the job asks for them
        self.scores: list[TokenScore] = []

    def add(self, tokens: DrawnTokens, accept_lengths: Sequence[int]) -> None:
        """Add new tokens."""
        self.accept_lengths = list(accept_lengths)
        for values in zip(*(tensor.tolist() for tensor in tokens), strict=True):
            token_id, logprob, policy_logprob = values
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.policy_logprobs.append(policy_logprob)
            if self.text is not None:
                self.text.add(token_id)

    def end(self, reason: FinishReason) -> None:
        """Note that all tokens are there."""
        if self.text is not None:
            self.text.end()
        self.finish_reason = reason

    def score(self, engine: EmbeddedEngine, num_top: int) -> None:
        """Let the engine score prompt and response."""
        self.scores = engine.score((*self.prompt_ids, *self.token_ids), num_top)


class Job:
    """The responses to some prompts with the same settings."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        make_text: Callable[[], ResponseText | None],
        on_news: Callable[[Job], None],
        *,
        num_top: int | None = None,
    ) -> None:
        """`on_news` is called in the batch's thread: after each pass that adds to the responses,
        and at the end. It must return at once. With `num_top` each response gets its scores, with
        so many of the most likely tokens.
        """
        self.prompts = list(prompts)
        self.params = params
        self.num_top = num_top
        self.responses = {
            response.key: response
            for prompt in prompts
            for index in range(params.num_samples)
            for response in [Response(prompt, index, make_text())]
        }
        self.on_news = on_news
        self.num_open = len(self.responses)
        self.error: Exception | None = None  # why it ended early

    @property
    def has_begun(self) -> bool:
        """Return whether there is a token."""
        return any(response.token_ids for response in self.responses.values())

    @property
    def is_over(self) -> bool:
        return self.num_open == 0 or self.error is not None

    def end_one(self) -> None:
        """Note that one more response has ended."""
        self.num_open -= 1

    def fail(self, error: Exception) -> None:
        """End the job early."""
        self.error = error
        self.on_news(self)


class LiveBatch:
    """Satisfies `engines.embedded.serving.Clients`. Any thread may call `submit` and `cancel`."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        *,
        longest: int,
        stop_token_ids: tuple[int, ...],
        policy_version: int,
    ) -> None:
        """`longest`: most positions of a prompt with its response."""
        self._engine = engine
        self._longest = longest
        self._stop_token_ids = stop_token_ids
        self._policy_version = policy_version
        self.lock = threading.Lock()  # guards everything below, and the responses of open jobs
        self._jobs: dict[ResponseKey, Job] = {}  # a job for every open response
        self._new: list[Job] = []
        self._stopped: list[ResponseKey] = []  # the engine may still compute these
        self._news: dict[Job, None] = {}  # jobs with tokens that they were not told of
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Return the number of responses that wait or run."""
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        """Let a job join. RuntimeError if the batch is closed."""
        with self.lock:
            if self._is_closed:
                raise RuntimeError("the engine is closed")
            self._new.append(job)
            self._jobs.update(dict.fromkeys(job.responses, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(job.params,), name="decode")
                self._thread.start()

    def cancel(self, job: Job) -> None:
        """Let a job leave. Its open responses take part in no further pass."""
        with self.lock:
            if job in self._new:
                self._new.remove(job)
            else:
                self._stopped += [key for key in job.responses if key in self._jobs]
            for key in job.responses:
                self._jobs.pop(key, None)
            self._news.pop(job, None)

    def close(self) -> None:
        """Cancel everything and wait for the thread."""
        with self.lock:
            self._is_closed = True
            jobs, thread = set(self._jobs.values()), self._thread
        for job in jobs:
            self.cancel(job)
            job.fail(RuntimeError("the engine is closed"))
        if thread is not None:
            thread.join()

    def _run(self, params: SamplingParams) -> None:
        """Serve until there is no work. Passes of jobs that sample as the first may be graphs."""
        widest = SamplingParams(
            max_new_tokens=self._longest,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=self._stop_token_ids,
        )
        try:
            self._engine.serve(
                self, widest, longest=self._longest, policy_version=self._policy_version
            )
        except Exception as error:  # the threads that wait raise it
            log.exception("the running batch has failed")
            with self.lock:
                jobs = set(self._jobs.values())
                self._thread = None
                for held in (self._jobs, self._new, self._stopped, self._news):
                    held.clear()
            for job in jobs:
                job.fail(error)

    # ---- called by the engine, in the thread

    def take(self, *, is_idle: bool) -> NewRequests | None:
        """See `Clients`. First tells jobs of the tokens of the last pass."""
        with self.lock:
            news, self._news = self._news, {}
        for job in news:
            job.on_news(job)
        with self.lock:
            if is_idle and not self._new:
                self._thread = None
                self._stopped.clear()
                return None
            new, self._new = self._new, []
            stopped, self._stopped = self._stopped, []
        return NewRequests([(prompt, job.params) for job in new for prompt in job.prompts], stopped)

    def receive(self, key: ResponseKey, tokens: DrawnTokens, accept_lengths: Sequence[int]) -> None:
        """See `Clients`."""
        with self.lock:
            job = self._jobs.get(key)
            if job is not None:  # else cancelled during the pass
                job.responses[key].add(tokens, accept_lengths)
                self._news[job] = None

    def finish(self, key: ResponseKey, reason: FinishReason) -> None:
        """See `Clients`."""
        with self.lock:
            job = self._jobs.get(key)
            if job is None:
                return
            response = job.responses[key]
            response.end(reason)
        if job.num_top is not None:
            response.score(self._engine, job.num_top)
        with self.lock:
            if self._jobs.pop(key, None) is not None:
                job.end_one()
