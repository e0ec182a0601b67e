"""Counters in the scheduler processes, and the questions that the engine asks them through SGLang's `check_weights` request.

`plugin.register` hooks `Answers` into the scheduler; `Question` is shared with the engine. Only `check_weights` is answered by
every tensor-parallel rank, and separately by the model runners of target and drafter. An action that starts with `PREFIX` is
our question.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING

from tlt_megatron.engines.sglang.adaptive_policy import PolicyFactory
from tlt_megatron.engines.sglang.held_weights import held_checksum
from tlt_megatron.engines.sglang.noise import is_active

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.model_runner import ModelRunner

PREFIX = "tlt_megatron."
ACCEPT_LENGTHS = "accept_lengths"  # key of a response's meta_info


class Question(StrEnum):
    """Questions to a scheduler. Answers are JSON."""

    ALIVE = "alive"  # shows that the scheduler responds
    MISSING_HOOKS = "missing_hooks"  # targets of our hooks that SGLang did not patch
    CHECKSUM = "checksum"  # of the loaded weights, as the sender computes it
    COUNTERS = "counters"  # since the last such question
    SELECTOR_STATE = "selector_state"  # None without adaptive speculation
    LOAD_SELECTOR_STATE = "load_selector_state"  # argument: the state
    TURN_OFF = "turn_off"  # argument: whether to decode plainly; answer: whether it can
    PASSES = "passes"  # of adaptive speculation, since the last such question


class Answers:
    """Counters of one scheduler process, and its answers."""

    def __init__(self, policies: PolicyFactory, targets: set[str]) -> None:
        self._policies = policies
        self._targets = targets
        self._num_passes = 0
        self._peak_tokens = 0

    # ---- hooks

    def answer(
        self,
        original: Callable[..., object],
        runner: ModelRunner,
        action: str,
        allow_quant_error: bool = False,
        skip_tensor_list: list[str] | None = None,
        *,
        role: str,
    ) -> object:
        """Around `ModelRunner.check_weights`: answer our questions. `skip_tensor_list` carries the argument of a question."""
        if not action.startswith(PREFIX):
            return original(runner, action, allow_quant_error, skip_tensor_list, role=role)
        question = Question(action.removeprefix(PREFIX))
        argument = json.loads(skip_tensor_list[0]) if skip_tensor_list else None
        answers = {
            Question.ALIVE: lambda: True,
            Question.MISSING_HOOKS: self._missing_hooks,
            Question.CHECKSUM: lambda: held_checksum(runner.model, is_draft=role != "target"),
            Question.COUNTERS: self._take_counters,
            Question.SELECTOR_STATE: self._selector_state,
            Question.LOAD_SELECTOR_STATE: lambda: self._load_selector_state(argument),
            Question.TURN_OFF: lambda: self._turn_off(argument),
            Question.PASSES: self._take_passes,
        }
        place = dict.fromkeys(
            ("tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size", "rank", "size"), 0
        )
        return {
            "checksums": {question: json.dumps(answers[question]())},
            "per_gpu_checksum": "",
            "parallelism_info": place | {"role": role},
        }

    def count_pass(
        self,
        original: Callable[..., None],
        processor: object,
        batch: ScheduleBatch,
        result: GenerationBatchResult,
    ) -> None:
        """Around `process_batch_result_decode`, which SGLang calls once per pass of a decode batch: update the counters."""
        allocator = processor.token_to_kv_pool_allocator
        used = allocator.size - allocator.available_size()
        self._num_passes += 1
        self._peak_tokens = max(self._peak_tokens, used)
        original(processor, batch, result)

    @staticmethod
    def note_accept_lengths(
        tokens: list[list[int]],
        processor: object,
        result: GenerationBatchResult,
        batch: ScheduleBatch,
    ) -> None:
        """After `_resolve_spec_v2_tokens`: record each request's tokens out of this verify pass. Skip plain passes.

        SGLang's own rates divide by the initial width. These lengths are counted, so they are also right when it adapts."""
        if not is_active() or result.speculative_num_draft_tokens == 1:
            return
        for request, committed in zip(batch.reqs, tokens, strict=True):
            if request.is_retracted or request.finished():
                continue
            if request.customized_info is None:
                request.customized_info = {}
            request.customized_info.setdefault(ACCEPT_LENGTHS, []).append(len(committed))

    @staticmethod
    def is_whole_response(original: bool, streamer: object, key: str) -> bool:
        """After `is_request_level_customized_info_key`: accept lengths are per request, not sliced by tokens."""
        return original or key == ACCEPT_LENGTHS

    # ---- answers

    def _missing_hooks(self) -> list[str]:
        from sglang.srt.plugins.hook_registry import HookRegistry

        return sorted(self._targets - HookRegistry._patched)

    def _take_counters(self) -> dict[str, int]:
        counters = {"num_passes": self._num_passes, "peak_tokens": self._peak_tokens}
        self._num_passes = self._peak_tokens = 0
        return counters

    def _selector_state(self) -> dict[str, object] | None:
        policy = self._policies.policy
        return None if policy is None else policy.selector.state_dict()

    def _load_selector_state(self, state: dict[str, object]) -> None:
        if self._policies.policy is not None:
            self._policies.policy.selector.load_state_dict(state)

    def _turn_off(self, is_off: bool) -> bool:
        policy = self._policies.policy
        if policy is not None:
            policy.is_off = is_off
        return policy is not None

    def _take_passes(self) -> list[dict[str, object]]:
        policy = self._policies.policy
        return [] if policy is None else [asdict(record) for record in policy.take_passes()]
