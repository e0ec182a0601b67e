"""SGLang as a rollout engine: `engines.base.RolloutEngine` with an in-process `sglang.Engine`.

SGLang's scheduler and detokenizer run in separate processes. Every wait for them is watched: this
rank raises an error within a second if one dies, after `sglang.request_timeout_s` if one hangs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.schema import RolloutSection, SglangSection, SpeculationSection
from tlt_megatron.engines.base import EngineStats, MorePrompts, PassRecord, group_rollouts
from tlt_megatron.engines.sglang.adaptive_policy import write_config
from tlt_megatron.engines.sglang.answers import Question
from tlt_megatron.engines.sglang.arguments import engine_arguments, plan_speculation
from tlt_megatron.engines.sglang.connection import DRAFT, TARGET, Connection
from tlt_megatron.engines.sglang.replica import in_step
from tlt_megatron.engines.sglang.sglang_responses import answer_all, generate_one
from tlt_megatron.engines.sglang.weights import WeightSender
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.models.own_drafter import own_tensors
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.process_groups import SINGLE, Group
from tlt_megatron.types import Prompt, Rollout, RolloutGroup, SamplingParams

Request = Callable[[], Awaitable[tuple[Rollout, Mapping[str, Any]]]]
# All tags of SGLang's memory saver.
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
# Timeout for the last pass to end. SGLang's scheduler dies if memory is released earlier.
_IDLE_TIMEOUT_S = 30.0


class SglangEngine:
    """See `RolloutEngine`. The constructor starts the processes.

    If the engine uses the GPUs of several ranks, the first of them starts it. The others have no
    connection: they answer no prompts, but take part in `sleep`, `wake` and the weight loads, and
    wait while the engine uses their GPU's memory."""

    def __init__(
        self,
        model_path: str,
        rollout: RolloutSection,
        section: SglangSection,
        device: Device,
        *,
        rank: int,
        max_prompt_tokens: int = 1024,
        speculation: SpeculationSection | None = None,
        replica: Group = SINGLE,
    ) -> None:
        """`replica`: the ranks whose GPUs the engine uses. All of them must call `sleep`, `wake`
        and the weight loads. ValueError for settings that SGLang does not support; RuntimeError if
        it does not start in time."""
        self._replica = replica
        self._num_ranks = int(section.engine_args.get("tp_size", 1))
        self._is_cuda = device.is_cuda
        self._version: int | None = None
        self._is_asleep = False
        self._plan = None if speculation is None else plan_speculation(speculation, model_path)
        self._stats = EngineStats()
        is_own = speculation is not None and speculation.drafter == OWN
        self._own = load_model_config(model_path) if is_own else None  # the drafter's policy
        self._routed = load_model_config(model_path) if rollout.routing_replay else None
        self._most_positions = max_prompt_tokens + rollout.max_new_tokens
        self._folder = tempfile.TemporaryDirectory(prefix="tlt_sglang_")
        self._sglang: Connection | None = None
        if replica.is_first:
            arguments = engine_arguments(
                model_path,
                rollout,
                section,
                speculation=self._plan,
                device_type=device.torch_device.type,
                device_index=device.torch_device.index or 0,
                rank=rank,
                max_prompt_tokens=max_prompt_tokens,
            )
            capacity = int(arguments["max_total_tokens"])
            self._most_positions = min(self._most_positions, capacity)
            if speculation is not None and self._plan is not None and self._plan.is_adaptive:
                path = Path(self._folder.name) / "adaptive.json"
                write_config(
                    path,
                    self._plan.strategies,
                    speculation.selector,
                    max_batch_size=rollout.max_batch_size,
                )
                arguments["speculative_adaptive_config"] = str(path)
            self._sglang = Connection(
                arguments, section, rank=rank, is_cpu=not device.is_cuda, num_ranks=self._num_ranks
            )
        self._weights = WeightSender(
            connection=self._sglang,
            replica=replica,
            device=device.torch_device,
            dtype=getattr(torch, rollout.dtype),
            num_ranks=self._num_ranks,
            offers_own=device.is_cuda,
            has_drafter=self._plan is not None and self._plan.has_draft_model,
        )

    def _ask(self, question: Question, argument: object = None) -> list[Any]:
        """Return the answers of SGLang's ranks; [None] on a rank without a connection."""
        return [None] if self._sglang is None else self._sglang.ask(question, argument=argument)

    # ---- weights and lifetime

    @torch.no_grad()
    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, checksum: Callable[[], int]
    ) -> None:
        """See `RolloutEngine`. The sender sums its tensors as cast to the engine's dtype."""
        self._require_awake()
        self._version = None
        self._load(TARGET, tensors, version, checksum)
        self._version = version

    def target_tensors(self) -> tuple[Tensor, Tensor]:
        """See `RolloutEngine`. Returns copies, because SGLang's tensors are in its scheduler.

        RuntimeError without a learned drafter or before `load_weights`."""
        return self._weights.target_tensors()

    def drafted_ids(self) -> Tensor | None:
        return None

    @torch.no_grad()
    def load_drafter_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, checksum: int
    ) -> None:
        """See `RolloutEngine`."""
        self._require_awake()
        if not self._weights.has_drafter:
            raise RuntimeError(f"drafter version {version}: the engine was given none to replace")
        # SGLang would overwrite the policy's with them.
        assert not any("embed_tokens" in name or "lm_head" in name for name in tensors)
        device = self._weights.device
        held = checksum_tensors((name, t.to(device)) for name, t in tensors.items())
        if held != checksum:
            raise RuntimeError(f"drafter version {version} has checksum {held}: must be {checksum}")
        named = tensors.items() if self._own is None else own_tensors(tensors, self._own)
        named = list(self._weights.cast(named))
        cast = checksum_tensors(named)
        self._load(DRAFT, named, version, lambda: cast)

    def pause_speculation(self, is_paused: bool) -> bool:
        """See `RolloutEngine`. Returns False if the engine spans several ranks, which would not see
        the switch, and for a fixed tree, which SGLang cannot turn off."""
        if self._num_ranks > 1:
            return False
        if self._plan is None:
            return True
        return all(self._ask(Question.TURN_OFF, is_paused))

    def checksum(self, role: str) -> int:
        """Return the checksum of the weights in use. RuntimeError if SGLang's ranks disagree."""
        assert self._sglang is not None
        answers = {int(answer) for answer in self._sglang.ask(Question.CHECKSUM, role=role)}
        if len(answers) != 1:
            raise RuntimeError(f"sglang's ranks hold different {role} weights: {sorted(answers)}")
        return answers.pop()

    def _load(
        self,
        role: str,
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        checksum: Callable[[], int],
    ) -> None:
        """Send tensors. The first rank compares checksums."""
        self._weights.send(tensors, role=role, version=str(version))
        with in_step("loading weights", self._replica):
            if self._sglang is None:
                return
            expected, held = checksum(), self.checksum(role)
            if held != expected:
                what = "policy_version=" if role == TARGET else "drafter version "
                raise RuntimeError(
                    f"weights of {what}{version} have checksum {held} in {self._weights.dtype}: must be {expected}"
                )

    def free_kv(self) -> None:
        """See `RolloutEngine`. SGLang keeps its KV until `sleep`."""

    def sleep(self) -> None:
        """Free cached keys and values. On a GPU also release the memory of KV, weights and graphs.

        The policy's weights are dropped, because `load_weights` sends them again; the drafter's are
        kept on the host."""
        if self._is_asleep:
            return
        with in_step("putting the engine to sleep", self._replica):
            if self._sglang is not None:
                manager = self._sglang.engine.tokenizer_manager
                flushed = self._sglang.run(manager.flush_cache(timeout_s=_IDLE_TIMEOUT_S))
                if not flushed.success:
                    raise RuntimeError(f"sglang cannot drop its keys and values: {flushed.message}")
                self._memory(self._sglang, "release_memory_occupation")
        self._is_asleep = True
        self._version = None if self._is_cuda else self._version

    def wake(self) -> None:
        """Undo `sleep`. On a GPU, release cached memory before, and load weights again after."""
        if not self._is_asleep:
            return
        with in_step("waking the engine", self._replica):
            if self._sglang is not None:
                self._memory(self._sglang, "resume_memory_occupation")
        self._is_asleep = False

    def _memory(self, sglang: Connection, method: str) -> None:
        if not self._is_cuda:
            return  # SGLang's memory saver does nothing on a CPU
        from sglang.srt.managers import io_struct

        requests = {
            "release_memory_occupation": io_struct.ReleaseMemoryOccupationReqInput,
            "resume_memory_occupation": io_struct.ResumeMemoryOccupationReqInput,
        }
        sglang.call(method, requests[method](tags=list(MEMORY_TAGS)))
        # The first rank's scheduler has answered for all. This all of them answer, when done.
        sglang.ask(Question.ALIVE)

    def close(self) -> None:
        if self._sglang is not None:
            self._sglang.close()
        self._folder.cleanup()

    # ---- generation

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        policy_version: int,
        on_finish: Callable[[Rollout], None] | None = None,
        on_features: Callable[[Rollout, Tensor], None] | None = None,  # noqa: ARG002
        should_stop: Callable[[], bool] | None = None,
        more_prompts: MorePrompts | None = None,
    ) -> list[RolloutGroup]:
        """See `RolloutEngine`. `on_features` is never called: decoding runs in SGLang's processes.
        `should_stop` and `more_prompts` are called every 0.02 s."""
        sglang = self._sglang
        if sglang is None:
            assert not prompts, "the first rank of the engine answers all prompts"
            return []
        self._require_awake()
        if self._version != policy_version:
            raise RuntimeError(
                f"policy_version={policy_version}: the engine holds {self._version or 'no'} weights"
            )
        started = time.perf_counter()
        settings = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        sglang.ask(Question.BEGIN, argument=settings)
        asked: list[Prompt] = []

        def requests_of(prompts: Sequence[Prompt]) -> list[Request]:
            self._check_lengths(prompts, params)
            asked.extend(prompts)
            return [
                partial(
                    generate_one,
                    sglang.engine,
                    prompt,
                    index,
                    params,
                    policy_version,
                    on_finish,
                    self._routed,
                )
                for prompt in prompts
                for index in prompt.sample_indices(params)
            ]

        def more_requests() -> list[Request] | None:
            later = more_prompts() if more_prompts is not None else None
            return None if later is None else requests_of(later.prompts)

        answered = sglang.run(
            answer_all(
                requests_of(prompts),
                should_stop,
                abort_all=sglang.abort_all,
                more_requests=more_requests,
            )
        )
        rollouts, metas = [r for r, _ in answered], [meta for _, meta in answered]
        self._stats = EngineStats(
            num_generated_tokens=sum(m["completion_tokens"] for m in metas),
            num_preemptions=sum(m["num_retractions"] for m in metas),
            seconds=time.perf_counter() - started,
        )
        return group_rollouts(asked, params, rollouts)

    def _check_lengths(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        for prompt in prompts:
            limit = prompt.limit(params)
            needed = len(prompt.token_ids) + limit
            if needed > self._most_positions:
                raise ValueError(
                    f"prompt {prompt.prompt_id!r} with {len(prompt.token_ids)} tokens and max_new_tokens="
                    f"{limit} needs {needed} positions: at most {self._most_positions}"
                )

    def stats(self) -> EngineStats:
        """See `RolloutEngine`. Passes and KV tokens are not counted."""
        return self._stats

    def take_passes(self) -> list[PassRecord]:
        """See `RolloutEngine`. Returns passes only with adaptive speculation."""
        return [
            PassRecord(**{**record, "accepted_by_depth": tuple(record["accepted_by_depth"])})
            for record in self._ask(Question.PASSES)[0] or []
        ]

    def state_dict(self) -> dict[str, object]:
        return {"selector": self._ask(Question.SELECTOR_STATE)[0]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if state.get("selector") is not None:
            self._ask(Question.LOAD_SELECTOR_STATE, state["selector"])

    def _require_awake(self) -> None:
        if self._is_asleep:
            raise RuntimeError("the engine sleeps: call wake() first")
