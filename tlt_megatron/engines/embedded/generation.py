"""One `generate` call of the embedded engine: prefill, sample and decode all requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.base import EngineStats, MorePrompts, PassRecord
from tlt_megatron.engines.embedded.decode import DecodeBatch, Ended
from tlt_megatron.engines.embedded.graph_pool import GraphPool
from tlt_megatron.engines.embedded.pass_clock import PassClock
from tlt_megatron.engines.embedded.prefill import prefill
from tlt_megatron.engines.embedded.scheduler import Scheduler, make_requests
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.speculation.verify import accepted_by_depth
from tlt_megatron.types import FinishReason, KeptTokens, Prompt, Rollout, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A plain pass, or the draft and verify passes of one speculative step."""

    strategy: SpeculationStrategy
    batch_size: int
    reason: str  # why this strategy was chosen
    num_committed: int  # tokens of all rows
    # drafted tokens of each row, also behind its end; empty for a plain pass
    accepted: Sequence[int]
    first_by_depth: Sequence[int] | None  # see `StrategySelector.observe`


class Intake:
    """The prompts and requests of a call: those of its start, then those of `more_prompts`."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        max_new_tokens: Sequence[Sequence[int]] | None,
        more_prompts: MorePrompts | None,
    ) -> None:
        """`max_new_tokens` is for the first prompts: see `make_requests`."""
        self.prompts = list(prompts)
        self.requests = make_requests(prompts, params, max_new_tokens)
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
        requests = make_requests(later.prompts, self._params, None, first_order=first_order)
        self.prompts += later.prompts
        self.requests += requests
        scheduler.add(requests)


class Generation:
    """The requests of a call. The engine calls `sample`, then `advance`, until `is_done`."""

    def __init__(
        self,
        model: Transformer,
        cache: KvCache,
        scheduler: Scheduler,
        params: SamplingParams,
        *,
        graphs: GraphPool,
        speculation: Speculation | None,
        wait: Callable[[], None],
    ) -> None:
        """`scheduler` holds the requests. `wait` is `Device.synchronize`."""
        self._model = model
        self._cache = cache
        self._graphs = graphs
        self._speculation = speculation
        self._scheduler = scheduler
        self._batch = DecodeBatch(
            model,
            cache,
            params,
            max_batch_size=scheduler.max_batch_size,
            graphs=graphs,
            speculation=speculation,
        )
        self._clock = PassClock(wait)
        self._step: _Step | None = None  # whose tokens the next `sample` draws
        self._num_computed = self._num_recomputed = 0  # prefilled tokens
        self._num_generated = self._num_unspeculated = 0
        self.passes: list[PassRecord] = []
        self._refreshes: list[tuple[float, float]] = []
        graphs.take_counts()
        graphs.take_capture_s()

    @property
    def is_done(self) -> bool:
        return self._scheduler.is_done

    def sample(self) -> list[Ended]:
        """Prefill, then sample a token for every row. Return complete responses, for `advance`."""
        chunks, admitted = self._scheduler.plan_prefill()
        if chunks or admitted:
            with self._clock.interrupted():
                if chunks:
                    new, again = prefill(self._model, self._cache, chunks)
                    self._num_computed += new
                    self._num_recomputed += again
                if admitted:
                    self._batch.add(admitted)
        if not self._batch.requests:
            return []  # the first prompt needs several prefill passes
        with self._clock.running():
            ended = self._batch.sample()
        if self._step is not None:
            self._record(self._step)
        return ended

    def advance(self, ended: Sequence[Ended]) -> None:
        """Remove complete responses and run one pass over the others."""
        batch, clock = self._batch, self._clock
        for end in ended:
            self._num_generated += end.token_ids_T.numel()
            if self._speculation is not None:
                self._speculation.finish(end.request, end.token_ids_T.tolist())
            self._scheduler.keep_turn(end.request, end.token_ids_T.tolist())
            self._scheduler.finish(end.request)
        batch.remove([end.row for end in ended])
        batch.grow(self._scheduler)
        self._step = None
        if batch.requests:
            strategy, reason = self._choose()
            clock.start()
            with clock.running():
                self._step = self._run_pass(strategy, reason)
            clock.exclude(self._graphs.take_capture_s())

    def _choose(self) -> tuple[SpeculationStrategy, str]:
        """Return the selector's strategy and reason. Refresh the drafter first if it will draft."""
        speculation = self._speculation
        if speculation is None:
            return OFF, "plain"
        decision = speculation.selector.choose(len(self._batch.requests))
        if not decision.strategy.is_learned:
            return decision.strategy, decision.reason
        started = time.perf_counter()
        if speculation.draft is not None and speculation.draft.refresh_if_stale():
            self._refreshes.append((started, time.perf_counter()))
        return decision.strategy, decision.reason

    def _run_pass(self, strategy: SpeculationStrategy, reason: str) -> _Step:
        batch, batch_size = self._batch, len(self._batch.requests)
        num_committed, accepted, first = batch_size, [], None
        if not strategy.is_off and not batch.enter_lanes(self._scheduler):
            self._num_unspeculated += 1
            strategy, reason = OFF, "no memory"
        if strategy.is_off:
            batch.forward(self._scheduler)
        else:
            num_committed, accepted, first = batch.speculate(strategy)
        return _Step(
            strategy=strategy,
            batch_size=batch_size,
            reason=reason,
            num_committed=num_committed,
            accepted=accepted,
            first_by_depth=first,
        )

    def _record(self, step: _Step) -> None:
        """Report the step's cost to the selector and store a PassRecord."""
        clock = self._clock
        depths = accepted_by_depth(step.accepted, step.strategy.depth)
        if self._speculation is not None:
            selector = self._speculation.selector
            selector.observe(
                step.strategy, step.batch_size, depths, clock.seconds, step.first_by_depth
            )
        self.passes.append(
            PassRecord(
                start_s=clock.start_s,
                seconds=clock.seconds,
                batch_size=step.batch_size,
                strategy=str(step.strategy),
                reason=step.reason,
                num_committed=step.num_committed,
                accepted_by_depth=tuple(depths),
                kv_tokens=(self._cache.num_pages - self._cache.num_free) * self._cache.page_size,
            )
        )

    def stats(self, seconds: float) -> EngineStats:
        """Return the counters of this call, which took `seconds`. Call it once, at the end."""
        counts = self._graphs.take_counts()
        return EngineStats(
            num_prompt_tokens=self._num_computed,
            num_recomputed_tokens=self._num_recomputed,
            num_generated_tokens=self._num_generated,
            num_decode_passes=self._batch.num_passes,
            num_preemptions=self._scheduler.num_preemptions,
            num_unspeculated_passes=self._num_unspeculated,
            seconds=seconds,
            peak_kv_tokens=self._cache.peak_pages * self._cache.page_size,
            kv_capacity_tokens=self._cache.num_pages * self._cache.page_size,
            num_graph_replays=sum(counts.num_replays.values()),
            eager_passes=counts.eager_by_reason(),
            drafter_refreshes=tuple(self._refreshes),
        )


def make_rollout(end: Ended, params: SamplingParams, policy_version: int) -> Rollout:
    prompt = end.request.state.prompt
    has_stopped = int(end.token_ids_T[-1]) in params.stop_token_ids
    return Rollout(
        prompt_id=prompt.prompt_id,
        draw_index=prompt.draw_index,
        sample_index=end.request.sample_index,
        prompt_ids=prompt.token_ids,
        token_ids=end.token_ids_T,
        logprobs=end.logprobs_T,
        policy_logprobs=end.policy_logprobs_T,
        finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        policy_version=policy_version,
        accept_lengths=tuple(end.request.accept_lengths),
        kept=_join_kept(end.request.kept),
        verify_starts=tuple(end.request.verify_starts),
    )


def _join_kept(kept: Sequence[Tensor]) -> KeptTokens | None:
    if not kept:
        return None
    counts = [ids.numel() for ids in kept]
    return KeptTokens(token_ids=torch.cat(list(kept)), counts=torch.tensor(counts).int())
