"""The entry point `sglang.srt.plugins`: adds our hooks through SGLang's own hook registry.

SGLang calls it in each of its processes, also for engines that are not ours. If a plugin fails,
SGLang only logs it. So the connection asks the scheduler for the hooks in place (`answers.py`) and
refuses a start without all of them. Hooks change only engines with our mark (`sglang_noise.mark`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import psutil
import torch
from torch import Tensor

from tlt_megatron.engines.sglang.adaptive_policy import AdaptiveHooks
from tlt_megatron.engines.sglang.answers import Answers
from tlt_megatron.engines.sglang.draft_ranking import DraftRanking
from tlt_megatron.engines.sglang.sglang_noise import NoiseSampling
from tlt_megatron.runtime.environment_variables import engine_owner

_BATCH_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo."
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
_SCHEDULER = "sglang.srt.managers.scheduler_components."
_RESULTS = _SCHEDULER + "batch_result_processor.SchedulerBatchResultProcessor."
_STREAMER = _SCHEDULER + "output_streamer.SchedulerOutputStreamer."
_SPECULATIVE = "sglang.srt.speculative."
_DRAFT_GRAPH = (
    _SPECULATIVE + "eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner."
)
_DRAFT_WORKER = _SPECULATIVE + "eagle_worker_v2.EagleDraftWorker."
_LOGPROBS = "sglang.srt.layers.logprob_processor."
_PARAMS = _SPECULATIVE + "adaptive_spec_params."
_UTILS = _SPECULATIVE + "spec_utils."
_VERIFY = _SPECULATIVE + "eagle_utils."
_WORKER = _SPECULATIVE + "eagle_worker_v2.EAGLEWorkerV2."


def register() -> None:
    """Register all hooks. SGLang applies them after this returns."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    _end_with_owner()
    noise, adaptive = NoiseSampling(), AdaptiveHooks(AdaptiveSpeculativeParams)
    targets: set[str] = set()
    answers = Answers(noise, adaptive, targets)
    for when, target, hook in _hooks(noise, adaptive, answers, DraftRanking(noise)):
        HookRegistry.register(target, hook, HookType(when))
        targets.add(target)


def _end_with_owner() -> None:
    """Make a process of our engine die with its rank. SystemExit if the rank has already died.

    SGLang asks the kernel for this too, but only after its imports."""
    owner = engine_owner()
    if owner is None or owner == os.getpid():
        return
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    if owner not in [process.pid for process in psutil.Process().parents()]:
        raise SystemExit(f"rank process {owner}, which started this engine process, has ended")


def _register(original: Callable[..., None], buffer: Tensor, *rest: object) -> None:
    """Around `_cuda_host_register`: SGLang registers the buffer of routes on a CPU too, where CUDA
    is missing.
    """
    if torch.cuda.is_available():
        original(buffer, *rest)


def _hooks(
    noise: NoiseSampling, adaptive: AdaptiveHooks, answers: Answers, ranking: DraftRanking
) -> Iterator[tuple[str, str, Callable[..., object]]]:
    """Yield (type, target, hook)."""
    yield "after", _BATCH_INFO + "from_schedule_batch", noise.keep_seeds
    yield "around", "sglang.srt.layers.sampler.create_sampler", noise.make_sampler
    yield "around", _VERIFY + "_verify_uses_greedy", noise.verify_greedily
    yield "around", _VERIFY + "eagle_sample", noise.verify_perturbed
    yield "around", _LOGPROBS + "compute_spec_logprobs", noise.spec_logprobs

    yield "around", _DRAFT_WORKER + "draft", ranking.draft
    yield "around", _DRAFT_WORKER + "draft_forward", ranking.draft_forward
    yield "around", _DRAFT_WORKER + "_draft_extend_for_prefill", ranking.extend_for_prefill
    yield "around", _DRAFT_WORKER + "_draft_extend_for_decode", ranking.extend_for_decode
    yield "around", _UTILS + "select_top_k_tokens", ranking.select
    yield "around", _DRAFT_GRAPH + "execute", ranking.graph_execute
    yield "around", _RUNNER + "forward", ranking.runner_forward
    yield "after", _UTILS + "renorm_draft_probs", ranking.keep_order

    yield "replace", _PARAMS + "AdaptiveSpeculativeParams", adaptive.make
    yield "around", _WORKER + "forward_batch_generation", adaptive.launch
    yield "after", _RESULTS + "_resolve_spec_v2_tokens", adaptive.resolve

    yield "around", _RUNNER + "check_weights", answers.answer
    yield "after", _RESULTS + "_resolve_spec_v2_tokens", answers.note_verify_pass
    yield "around", "sglang.srt.mem_cache.pool_host.common._cuda_host_register", _register
    yield "after", _STREAMER + "is_request_level_customized_info_key", answers.is_whole_response
