"""What the engine tells and asks the scheduler processes, through `check_weights`.

`check_weights` is SGLang's only request that every tensor-parallel rank answers, and separately the
model runners of target and drafter. An action that starts with `PREFIX` is our question.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tlt_megatron.engines.sglang.adaptive_policy import AdaptiveHooks
from tlt_megatron.engines.sglang.held_weights import named_held_tensors
from tlt_megatron.engines.sglang.sglang_noise import NoiseSampling, is_active
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.types import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.model_runner import ModelRunner

PREFIX = "tlt_megatron."
VERIFY_PASSES = "verify_passes"  # key of a response's meta_info: (first token, tokens out) of each


class Question(StrEnum):
    """Questions to a scheduler. From SELECTOR_STATE on: null without adaptive speculation."""

    ALIVE = "alive"  # shows that the scheduler responds
    MISSING_HOOKS = "missing_hooks"  # targets of our hooks that SGLang did not patch
    CHECKSUM = "checksum"  # the checksum of the loaded weights, as the sender computes it
    BEGIN = "begin"  # a `generate` call; argument: temperature, top_p and top_k
    SELECTOR_STATE = "selector_state"
    LOAD_SELECTOR_STATE = "load_selector_state"  # argument: the state
    TURN_OFF = "turn_off"  # argument: whether to decode plainly; answer: True
    PASSES = "passes"  # the passes since the last such question or BEGIN


@dataclass(slots=True, eq=False)
class Answers:
    """The answers of one scheduler process."""

    noise: NoiseSampling
    adaptive: AdaptiveHooks
    targets: set[str]  # names that our hooks patch

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
        """Around `check_weights`: answer our questions. `skip_tensor_list` carries an argument."""
        if not action.startswith(PREFIX):
            return original(runner, action, allow_quant_error, skip_tensor_list, role=role)
        question = Question(action.removeprefix(PREFIX))
        argument = json.loads(skip_tensor_list[0]) if skip_tensor_list else None
        answer = self._answer(question, argument, runner, is_draft=role != "target")
        place = dict.fromkeys(
            ("tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size", "rank", "size"), 0
        )
        return {
            "checksums": {question: json.dumps(answer)},
            "per_gpu_checksum": "",
            "parallelism_info": place | {"role": role},
        }

    @staticmethod
    def note_verify_pass(
        tokens: list[list[int]],
        _processor: SchedulerBatchResultProcessor,
        result: GenerationBatchResult,
        batch: ScheduleBatch,
    ) -> None:
        """After `_resolve_spec_v2_tokens`: record where each request's tokens of this verify pass
        start, and how many they are.

        SGLang's own rates divide by the initial width, which is wrong when it adapts."""
        if not is_active() or result.speculative_num_draft_tokens == 1:
            return
        for request, committed in zip(batch.reqs, tokens, strict=True):
            if request.is_retracted or request.finished():
                continue
            if request.customized_info is None:
                request.customized_info = {}
            passes = request.customized_info.setdefault(VERIFY_PASSES, [])
            passes.append((len(request.output_ids), len(committed)))

    @staticmethod
    def is_whole_response(original: bool, _streamer: object, key: str) -> bool:
        """After `is_request_level_customized_info_key`: verify passes are not per token."""
        return original or key == VERIFY_PASSES

    # ----

    def _answer(
        self, question: Question, argument: Any, runner: ModelRunner, *, is_draft: bool
    ) -> object:
        """Return the answer; None without adaptive speculation if the question is about it."""
        policy = self.adaptive.policy
        match question:
            case Question.ALIVE:
                return True
            case Question.MISSING_HOOKS:
                from sglang.srt.plugins.hook_registry import HookRegistry

                return sorted(self.targets - HookRegistry._patched)
            case Question.CHECKSUM:
                return checksum_tensors(named_held_tensors(runner.model, is_draft=is_draft))
            case Question.BEGIN:
                self.noise.params = SamplingParams(**argument)
                if policy is not None:
                    policy.take_passes()
            case _ if policy is None:
                return None
            case Question.SELECTOR_STATE:
                return policy.selector.state_dict()
            case Question.LOAD_SELECTOR_STATE:
                policy.selector.load_state_dict(argument)
            case Question.TURN_OFF:
                policy.is_off = argument
                return True
            case Question.PASSES:
                return [asdict(record) for record in policy.take_passes()]
        return None
