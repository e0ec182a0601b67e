"""One `generate` call of the embedded engine: prefill, sample and decode all requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.base import EngineStats, MorePrompts, PassRecord
from tlt_megatron.engines.embedded.decode import Advance, DecodeBatch, Ended
from tlt_megatron.engines.embedded.model_pair import Models
from tlt_megatron.engines.embedded.prefill import prefill
from tlt_megatron.engines.embedded.request import DrawnTokens, Request, make_requests
from tlt_megatron.engines.embedded.scheduler import Scheduler
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.speculation.verify import accepted_by_depth
from tlt_megatron.types import Prompt, SamplingParams


class _Step(NamedTuple):
    """A plain pass, or the draft and verify passes of one speculative step."""

    strategy: SpeculationStrategy
    reason: str  # why this strategy was chosen
    batch_size: int
    start_s: float  # on the clock of time.perf_counter
    advance: Advance


class Intake:
    """The prompts and requests of a call: those of its start, then those of `more_prompts`."""

    def __init__(
        self, prompts: Sequence[Prompt], params: SamplingParams, more_prompts: MorePrompts | None
    ) -> None:
        self.prompts = list(prompts)
        self.requests = make_requests(prompts, params)
        self._params = params
        self._more_prompts = more_prompts

    @property
    def is_open(self) -> bool:
        return self._more_prompts is not None

    def poll(self, scheduler: Scheduler) -> None:
        """Give `scheduler` the requests that have come since the last call."""
        assert self._more_prompts is not None
        later = self._more_prompts()
        if later is None:
            self._more_prompts = None
            scheduler.close()
            return
        for key in later.ended:
            scheduler.drop_turn(key)
        first_order = len(self.requests)
        requests = make_requests(later.prompts, self._params, first_order=first_order)
        self.prompts += later.prompts
        self.requests += requests
        scheduler.add(requests)


class Generation:
    """The requests of a call. The engine calls `sample`, then `advance`, until `is_done`."""

    def __init__(
        self,
        models: Models,
        scheduler: Scheduler,
        *,
        speculation: Speculation | None,
        wait: Callable[[], None],
    ) -> None:
        """`scheduler` holds the requests. `wait` is `Device.synchronize`."""
        self._models = models
        self._speculation = speculation
        self._scheduler = scheduler
        self._batch = DecodeBatch(models, scheduler, speculation)
        self._wait = wait
        self._step: _Step | None = None  # the pass whose tokens the next `sample` draws
        # A GPU runs a plain pass while its tokens are awaited: the pass is its launch and their
        # sampling.
        self._step_s = 0.0
        self._num_prefilled = self._num_generated = self._num_unspeculated = 0
        self.passes: list[PassRecord] = []
        self._refreshes: list[tuple[float, float]] = []
        models.graphs.start_counts()

    @property
    def is_done(self) -> bool:
        return self._scheduler.is_done

    def sample(self) -> list[Ended]:
        """Prefill, then sample a token for every row. Return complete responses, for `advance`."""
        chunks, admitted = self._scheduler.plan_prefill()
        if chunks or admitted:
            # Prefilling does not count as cost of the pass and must not hide the wait for it.
            with self._counted():
                self._wait()
            if chunks:
                self._num_prefilled += prefill(self._models.policy, self._models.cache, chunks)
            if admitted:
                self._batch.add(admitted)
            self._wait()
        if not self._batch.requests:
            return []  # the first prompt needs several prefill passes
        with self._counted():
            ended = self._batch.sample()
        if self._step is not None:
            self._record(self._step)
        return ended

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the time of this block as part of the pass."""
        started = time.perf_counter()
        yield
        self._step_s += time.perf_counter() - started

    def take_news(self) -> list[tuple[Request, DrawnTokens]]:
        """Return the tokens of each running response since the last call, after `sample`."""
        return self._batch.take_news() if self._batch.requests else []

    def advance(self, ended: Sequence[Ended], stopped: Sequence[Request] = ()) -> None:
        """Remove complete responses, and running ones that nobody needs, and run one pass over the
        others.
        """
        batch = self._batch
        for end in ended:
            token_ids = end.tokens.token_ids_T.tolist()
            self._num_generated += len(token_ids)
            if self._speculation is not None:
                self._speculation.finish(end.request, token_ids)
            self._scheduler.keep_turn(end.request, token_ids)
            self._scheduler.finish(end.request)
        for request in stopped:
            self._scheduler.finish(request)
        batch.remove([*(end.request for end in ended), *stopped])
        batch.grow()
        self._step = None
        if batch.requests:
            strategy, reason = self._choose()
            captured_s = self._models.graphs.capture_s
            self._step_s = 0.0
            with self._counted():
                self._step = self._run_pass(strategy, reason)
            self._step_s -= self._models.graphs.capture_s - captured_s

    def _choose(self) -> tuple[SpeculationStrategy, str]:
        """Return the selector's strategy and reason. Refresh the drafter first if it will draft."""
        speculation = self._speculation
        if speculation is None:
            return OFF, "plain"
        decision = speculation.selector.choose(len(self._batch.requests))
        if decision.strategy.is_learned and speculation.draft is not None:
            started = time.perf_counter()
            if speculation.draft.refresh_if_stale():
                self._refreshes.append((started, time.perf_counter()))
        return decision.strategy, decision.reason

    def _run_pass(self, strategy: SpeculationStrategy, reason: str) -> _Step:
        batch, started = self._batch, time.perf_counter()
        batch_size = len(batch.requests)
        if not strategy.is_off and not batch.enter_lanes():
            self._num_unspeculated += 1
            strategy, reason = OFF, "no memory"
        advance = batch.forward() if strategy.is_off else batch.speculate(strategy)
        return _Step(strategy, reason, batch_size, started, advance)

    def _record(self, step: _Step) -> None:
        """Report the step's cost to the selector and store a PassRecord."""
        num_committed, accepted, first_by_depth = step.advance
        depths = accepted_by_depth(accepted, step.strategy.depth)
        if self._speculation is not None:
            self._speculation.selector.observe(
                step.strategy, step.batch_size, depths, self._step_s, first_by_depth
            )
        self.passes.append(
            PassRecord(
                start_s=step.start_s,
                seconds=self._step_s,
                batch_size=step.batch_size,
                strategy=str(step.strategy),
                reason=step.reason,
                num_committed=num_committed,
                accepted_by_depth=tuple(depths),
            )
        )

    def stats(self, seconds: float) -> EngineStats:
        """Return the counters of this call, which took `seconds`. Call it once, at the end."""
        graphs = self._models.graphs
        return EngineStats(
            num_prefilled_tokens=self._num_prefilled,
            num_generated_tokens=self._num_generated,
            num_preemptions=self._scheduler.num_preemptions,
            num_unspeculated_passes=self._num_unspeculated,
            seconds=seconds,
            num_graph_replays=graphs.num_replays.total(),
            eager_passes=dict(graphs.eager_passes),
            drafter_refreshes=tuple(self._refreshes),
        )
