"""The embedded rollout engine: satisfies `engines.base.RolloutEngine` in pure torch.

It plans its memory from sizes before it allocates anything. One iteration of its loop is prefill,
sample, decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tlt_megatron.config.layout import PAGE_TOKENS, most_pages_of, pages_of
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.base import (
    EngineStats,
    GenerationStopped,
    MorePrompts,
    PassRecord,
    group_rollouts,
)
from tlt_megatron.engines.embedded.ended_responses import features_of, make_rollout
from tlt_megatron.engines.embedded.generation import Generation, Intake
from tlt_megatron.engines.embedded.graph_pool import GraphPool
from tlt_megatron.engines.embedded.memory_plan import MemoryPlan, num_routes, plan_memory
from tlt_megatron.engines.embedded.model_pair import Models
from tlt_megatron.engines.embedded.policy_weights import PolicyWeights
from tlt_megatron.engines.embedded.scheduler import Scheduler
from tlt_megatron.engines.embedded.scoring import TokenScore, score_tokens
from tlt_megatron.engines.embedded.serving import Clients, serve_clients
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.runtime.device import Device
from tlt_megatron.types import Prompt, Rollout, RolloutGroup, SamplingParams

_ASLEEP, _CLOSED = "the engine is asleep: call wake() first", "the engine is closed"
_IDLE_S = 0.002  # between two calls of `more_prompts` while there is nothing to generate


class EmbeddedEngine:
    """See `engines.base.RolloutEngine`. The first `load_weights` allocates the weights, the first
    `generate` the KV.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        section: RolloutSection,
        device: Device,
        *,
        max_prompt_tokens: int = 1024,
        tap_layers: tuple[int, ...] = (),
        make_speculation: Callable[[Tensor, Tensor], Speculation] | None = None,
    ) -> None:
        """Features are the last hidden state, then the states after `tap_layers`. An EAGLE-3
        drafter reads the latter.

        After the first `load_weights`, the engine speculates with the result of
        `make_speculation(embedding, lm_head)`."""
        self._weights = PolicyWeights(model_config, section, device.torch_device)
        self._tap_layers = tap_layers
        self._section = section
        self._device = device
        self._max_prompt_tokens = max_prompt_tokens
        self._make_speculation = make_speculation
        self._speculation: Speculation | None = None
        self._paused: Speculation | None = None
        self.has_graphs = section.graphs != "off" and device.graph_memory() is not None
        self._plan = self.memory_plan(())
        self._graphs = self._make_graphs()
        self._cache: KvCache | None = None
        self._stats = EngineStats()
        self._passes: list[PassRecord] = []
        self._unusable = ""  # why, while asleep or after `close`

    def _make_graphs(self) -> GraphPool:
        new_memory = self._device.graph_memory if self.has_graphs else lambda: None
        return GraphPool(self._plan.graphs, new_memory)

    def memory_plan(self, strategies: Sequence[SpeculationStrategy] | None = None) -> MemoryPlan:
        """Return the memory of this engine when awake, with these strategies (default: its own).
        Allocates nothing.
        """
        if strategies is None:
            return self._plan
        return plan_memory(
            self._weights.config,
            self._section,
            strategies,
            device=self._device,
            has_graphs=self.has_graphs,
            max_prompt_tokens=self._max_prompt_tokens,
            num_taps=len(self._tap_layers),
        )

    # ---- weights and lifetime

    @torch.no_grad()  # not inference mode: a drafter may train against these tensors
    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, checksum: Callable[[], int]
    ) -> None:
        """See `RolloutEngine`. The sender sums its tensors as cast to the engine's dtype."""
        self._require_awake()
        self._weights.load(tensors, version=version, checksum=checksum)
        if self._speculation is not None:
            self._speculation.target_changed()
        elif self._make_speculation is not None:
            make, self._make_speculation = self._make_speculation, None
            self.set_speculation(make(*self.target_tensors()))

    def target_tensors(self) -> tuple[Tensor, Tensor]:
        """See `RolloutEngine`. RuntimeError before the first `load_weights`."""
        model = self._weights.model
        return model.embedding, model.lm_head

    def drafted_ids(self) -> Tensor | None:
        draft = None if self._speculation is None else self._speculation.draft
        return None if draft is None else draft.ids_C

    def set_speculation(self, speculation: Speculation | None) -> None:
        """Start speculation with the next `generate`, or stop it (None). Tokens stay the same; the
        KV is reallocated.

        ValueError if the drafter reads other tap layers than the engine keeps.
        """
        self._require_awake()
        tap_layers = self._tap_layers
        if speculation is not None and speculation.draft is not None:
            tap_layers = speculation.draft.config.aux_layer_ids
        if tap_layers != self._tap_layers:
            raise ValueError(
                f"the drafter reads aux_layer_ids={tap_layers}, the engine keeps the states"
                f" after layers {self._tap_layers}: must be the same"
            )
        self._speculation = speculation
        self._drop_kv()
        self._plan = self.memory_plan(() if speculation is None else speculation.strategies)
        self._graphs = self._make_graphs()

    def load_drafter_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, checksum: int
    ) -> None:
        """See `RolloutEngine`. Also allowed between two passes of a running `generate`: only the
        drafter's KV is rebuilt.
        """
        self._require_awake()
        if self._speculation is None:
            raise RuntimeError(f"drafter version {version}: the engine was given none to replace")
        device = self._device.torch_device
        held = checksum_tensors((name, t.to(device)) for name, t in tensors.items())
        if held != checksum:
            raise RuntimeError(f"drafter version {version} has checksum {held}: must be {checksum}")
        self._speculation.load_drafter(tensors)

    def pause_speculation(self, is_paused: bool) -> bool:
        """See `RolloutEngine`. A pause frees the memory of speculation."""
        if is_paused and self._speculation is not None:
            self._paused = self._speculation
            self.set_speculation(None)
        elif not is_paused and self._paused is not None:
            self.set_speculation(self._paused)
            self._paused = None
        return True

    def free_kv(self) -> None:
        """See `RolloutEngine`. Also frees all graphs. With `rollout.graphs=keep` it frees nothing.

        Graphs read fixed addresses of KV and weights. torch's allocator cannot give memory back and
        take it again at the same address, so graphs are captured anew after the KV was freed.
        """
        if not self._keeps_all:
            self._drop_kv()

    @property
    def _keeps_all(self) -> bool:
        return self._section.graphs == "keep" and self.has_graphs

    def _drop_kv(self) -> None:
        self._graphs.drop()
        self._cache = None

    def sleep(self) -> None:
        """Free the KV and all graphs, on a GPU also the weights: `load_weights` sends them again.

        With `rollout.graphs=keep` all of them stay.
        """
        self._require_open()
        self.free_kv()
        if self._device.is_cuda and not self._keeps_all:
            self._weights.free()
        self._unusable = _ASLEEP

    def wake(self) -> None:
        """Undo `sleep`. On a GPU call `load_weights` after it."""
        self._require_open()
        self._weights.restore()
        self._unusable = ""

    def stats(self) -> EngineStats:
        return self._stats

    def take_passes(self) -> list[PassRecord]:
        passes, self._passes = self._passes, []
        return passes

    def state_dict(self) -> dict[str, object]:
        return {} if self._speculation is None else self._speculation.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """See `RolloutEngine`. Does nothing if the state is empty or the engine has no
        speculation.
        """
        if state and self._speculation is not None:
            self._speculation.load_state_dict(state)

    def close(self) -> None:
        self._drop_kv()
        self._weights.close()
        self._unusable = _CLOSED

    def _require_open(self) -> None:
        if self._unusable == _CLOSED:
            raise RuntimeError(_CLOSED)

    def _require_awake(self) -> None:
        if self._unusable:
            raise RuntimeError(self._unusable)

    # ---- generation

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        policy_version: int,
        on_finish: Callable[[Rollout], None] | None = None,
        on_features: Callable[[Rollout, Tensor], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        more_prompts: MorePrompts | None = None,
    ) -> list[RolloutGroup]:
        """See `RolloutEngine`. `on_features` receives the hidden state after the final norm, then
        the states after `tap_layers`.
        """
        self._require_awake()
        self._weights.model_of(policy_version)
        started = time.perf_counter()
        intake = Intake(prompts, params, more_prompts)
        longest_later = 0
        if intake.is_open:
            # those before `first_position` are observations already
            lengths = (len(p.token_ids) - p.first_position + p.limit(params) for p in prompts)
            known = max(lengths, default=0)
            longest_later = known + self._section.observation_tokens
        keeps_features = on_features is not None
        cache = self._ready_cache(prompts, params, longest_later, keeps_features=keeps_features)
        scheduler = Scheduler(
            intake.requests,
            cache,
            max_batch_size=self._section.max_batch_size,
            prefill_chunk_tokens=self._section.prefill_chunk_tokens,
            longest_later=longest_later,
        )
        models, run = self._start(cache, scheduler, params)
        rollouts: dict[int, Rollout] = {}
        while intake.is_open or not run.is_done:
            if should_stop is not None and should_stop():
                raise GenerationStopped(f"{len(intake.requests) - len(rollouts)} requests dropped")
            if intake.is_open:
                intake.poll(scheduler)
                if run.is_done:
                    time.sleep(_IDLE_S)
                    continue
            ended = run.sample()
            for end in ended:
                rollout = make_rollout(end, models, policy_version)
                rollouts[end.request.order] = rollout
                if on_features is not None:
                    on_features(rollout, features_of(end.request, cache))
                if on_finish is not None:
                    on_finish(rollout)
            run.advance(ended)
        self._stats = run.stats(time.perf_counter() - started)
        ordered = [rollouts[order] for order in range(len(rollouts))]
        return group_rollouts(intake.prompts, params, ordered)

    def _start(
        self, cache: KvCache, scheduler: Scheduler, params: SamplingParams
    ) -> tuple[Models, Generation]:
        speculation, wait = self._speculation, self._device.synchronize
        models = Models(
            policy=self._weights.model,
            draft=speculation.draft if speculation is not None else None,
            cache=cache,
            graphs=self._graphs,
            params=params,
        )
        run = Generation(models, scheduler, speculation=speculation, wait=wait)
        self._passes = run.passes
        return models, run

    @torch.inference_mode()
    def serve(
        self, clients: Clients, params: SamplingParams, *, longest: int, policy_version: int
    ) -> None:
        """Answer requests as they come, until `clients.take` returns None.

        Every request has the stop tokens of `params`, at most its `max_new_tokens`, and with its
        prompt at most `longest` positions. Passes over rows that sample as `params` say can be
        graphs. RuntimeError as for `generate`.
        """
        self._require_awake()
        self._weights.model_of(policy_version)
        cache = self._ready_cache([], params, longest, keeps_features=False)
        scheduler = Scheduler(
            [],
            cache,
            max_batch_size=self._section.max_batch_size,
            prefill_chunk_tokens=self._section.prefill_chunk_tokens,
            longest_later=longest,
            is_serving=True,
        )
        _, run = self._start(cache, scheduler, params)
        serve_clients(run, scheduler, clients, params)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], num_top: int) -> list[TokenScore]:
        """See `score_tokens`. The thread of `serve` may call it between two passes."""
        return score_tokens(self._weights.model, token_ids, num_top)

    def _ready_cache(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        longest_later: int,
        *,
        keeps_features: bool,
    ) -> KvCache:
        """Check that each request fits into the KV on its own. Then allocate the KV if needed, and
        clear it.
        """
        num_pages = self._plan.kv_tokens // PAGE_TOKENS
        longest = longest_later
        for prompt in prompts:
            num_tokens, limit = len(prompt.token_ids), prompt.limit(params)
            longest = max(longest, num_tokens + limit)
            if num_tokens == 0:
                raise ValueError(f"prompt {prompt.prompt_id!r} is empty")
            needed = pages_of(num_tokens, limit)
            if longest_later:
                needed = max(needed, most_pages_of(longest_later))
            if needed > num_pages:
                raise ValueError(
                    f"prompt {prompt.prompt_id!r} of {num_tokens} tokens with max_new_tokens={limit}"
                    f" needs {needed} KV pages of {PAGE_TOKENS}: the engine has {num_pages}"
                    f" (rollout.kv_cache_tokens={self._section.kv_cache_tokens})"
                )
        self._reserve_positions(longest)
        has_drafter = self._speculation is not None and self._speculation.draft is not None
        keeps_features = keeps_features or has_drafter
        if self._cache is None or (keeps_features and not self._cache.has_features):
            self._drop_kv()  # first, so that two never exist at once
            self._cache = KvCache(
                self._weights.config,
                num_pages=num_pages,
                page_size=PAGE_TOKENS,
                dtype=self._weights.dtype,
                device=self._device.torch_device,
                num_draft_layers=int(has_drafter),
                tap_layers=self._tap_layers if keeps_features else None,
                has_scratch=self.has_graphs,
            )
            self._cache.keep_routes(num_routes(self._weights.config, self._section))
        self._cache.reset()
        return self._cache

    def _reserve_positions(self, longest: int) -> None:
        """Make the rotary tables long enough. With graphs use the planned length at once: captured
        addresses must stay.
        """
        speculation = self._speculation
        longest += self._plan.draft_slots
        if self.has_graphs:
            longest = max(longest, self._plan.graphs.max_length)
        self._weights.model.rotary.reserve(longest)
        if speculation is not None and speculation.draft is not None:
            speculation.draft.rotary.reserve(longest)
