"""Turns settings into the options of SGLang's Engine; `sglang.engine_args` are passed on."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tlt_megatron.config.draft_folder import read_architecture
from tlt_megatron.config.layout import draft_slack
from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.schema import RolloutSection, SglangSection, SpeculationSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.sglang.sglang_noise import MARK

_ALGORITHMS = {"LlamaForCausalLMEagle": "EAGLE", "LlamaForCausalLMEagle3": "EAGLE3"}
_FIRST_PORT = 21000
_PORTS_PER_RANK = 16
_RANKS_PER_NODE = 64
# The CPU backend that can verify draft trees. Plain decoding uses torch_native.
_CPU_TREE_BACKEND = "intel_amx"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """The speculation settings for SGLang."""

    strategies: tuple[SpeculationStrategy, ...]  # one strategy, or several chains to choose from
    options: Mapping[str, object]

    @property
    def is_adaptive(self) -> bool:
        """Whether SGLang can switch strategies before every step: chains of a draft model.

        Also true for one fixed chain, so that it can be turned off and on."""
        return self.has_draft_model and all(strategy.is_chain for strategy in self.strategies)

    @property
    def has_draft_model(self) -> bool:
        return "speculative_draft_model_path" in self.options


def plan_speculation(section: SpeculationSection, model_path: str = "") -> SpeculationPlan | None:
    """Return the plan, or None if speculation is off. ValueError for what SGLang does not support.
    The drafter of a policy in `model_path` may be its own layer.

    It keeps graphs for one `topk`, adapts chains alone, and does not mix two kinds of drafts."""
    if not section.enabled:
        return None
    strategies = section.parsed_strategies
    if section.selector == "fixed":
        strategies = strategies[:1]
    drafting = tuple(strategy for strategy in strategies if not strategy.is_off)
    for strategy in drafting:
        if strategy.num_retrieved and len(drafting) > 1:
            raise ValueError(
                f"speculation.strategies={strategy}: sglang drafts with the n-gram cache alone or not at all; one strategy"
                " such as 'ngram_8' with speculation.selector=fixed"
            )
        if section.selector != "fixed" and strategy.is_learned and not strategy.is_chain:
            raise ValueError(
                f"speculation.strategies={strategy}: sglang chooses among chains alone (topk 1, such as '4_1_4'); a tree"
                " needs speculation.selector=fixed"
            )
    if not drafting:
        raise ValueError(f"speculation.strategies={section.strategies}: all are off")
    if drafting[0].num_retrieved:
        options: dict[str, object] = {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": drafting[0].num_retrieved + 1,
        }
    else:
        widest = max(drafting, key=lambda strategy: strategy.num_steps)
        is_own = section.drafter == OWN
        algorithm = "EAGLE" if is_own else _ALGORITHMS[read_architecture(section.drafter)]
        options = {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": model_path if is_own else section.drafter,
            "speculative_num_steps": widest.num_steps,
            "speculative_eagle_topk": widest.topk,
            "speculative_num_draft_tokens": widest.num_draft_tokens + 1,  # the root's row counts
            "speculative_adaptive": widest.is_chain,
        }
    return SpeculationPlan(strategies=drafting, options=options)


def engine_arguments(
    model_path: str,
    rollout: RolloutSection,
    section: SglangSection,
    *,
    speculation: SpeculationPlan | None,
    device_type: str,
    device_index: int,
    rank: int,
    max_prompt_tokens: int,
) -> dict[str, Any]:
    """Return all options of one rank's engine. ValueError names keys that we set ourselves, or a
    dtype for which SGLang has no kernels."""
    # sgl_kernel's rmsnorm for GPUs has no float32: SGLang would die in its first pass.
    known = ("float32", "bfloat16") if device_type == "cpu" else ("bfloat16",)
    if rollout.dtype not in known:
        raise ValueError(
            f"rollout.dtype={rollout.dtype!r}: must be {' or '.join(known)} where rollout.engine='sglang' and the device"
            f" is {device_type}"
        )
    strategies = speculation.strategies if speculation else ()
    longest = max_prompt_tokens + rollout.max_new_tokens
    longest += draft_slack([str(strategy) for strategy in strategies])
    ours: dict[str, object] = {
        "model_path": model_path,
        "dtype": rollout.dtype,
        "device": device_type,
        "base_gpu_id": device_index,
        "nccl_port": free_port(rank),
        "skip_tokenizer_init": True,
        "served_model_name": MARK,
        "context_length": longest,
        "max_running_requests": rollout.max_batch_size,
        "max_total_tokens": rollout.kv_cache_tokens or rollout.max_batch_size * longest,
        "chunked_prefill_size": rollout.prefill_chunk_tokens,
    }
    # Fused into the other experts, a shared one could not be compared after an update.
    defaults: dict[str, object] = {"log_level": "error", "disable_shared_experts_fusion": True}
    if speculation is not None:
        ours |= speculation.options
    if rollout.routing_replay:
        ours["enable_return_routed_experts"] = True
        _check_routes(rollout, speculation)
    if device_type == "cpu":
        defaults |= _cpu_defaults(speculation)
    else:
        ours["enable_memory_saver"] = True
        # SGLang's prefill graphs refuse a memory saver that releases graphs too, as ours does.
        defaults["disable_prefill_cuda_graph"] = True
        if speculation is not None and speculation.has_draft_model:
            # The policy is sent again after every update; a drafter may stay.
            ours["enable_draft_weights_cpu_backup"] = True
    clashing = sorted(ours.keys() & section.engine_args.keys())
    if clashing:
        raise ValueError(
            f"sglang.engine_args: {', '.join(clashing)} follow from other sections (model, rollout, speculation) and cannot"
            " be set here"
        )
    return defaults | ours | section.engine_args


def _check_routes(rollout: RolloutSection, speculation: SpeculationPlan | None) -> None:
    """Raise ValueError where SGLang would lose the routes of verified tokens.

    It keeps routes by KV slot. A tree's accepted tokens move to other slots, without their routes.
    Its buffer for those of a pass has `prefill_chunk_tokens` rows and does not count drafted
    tokens.
    """
    if speculation is None:
        return
    if not speculation.is_adaptive:
        raise ValueError(
            f"rollout.routing_replay=True with speculation.strategies={speculation.strategies[0]}: sglang returns the routes of"
            " learned chains alone (topk 1, such as '4_1_4')"
        )
    num_rows = rollout.max_batch_size * max(each.num_rows for each in speculation.strategies)
    if num_rows > rollout.prefill_chunk_tokens:
        raise ValueError(
            f"rollout.prefill_chunk_tokens={rollout.prefill_chunk_tokens}: must be >= {num_rows} with rollout.routing_replay, the"
            " tokens of a verify pass over rollout.max_batch_size requests"
        )


def _cpu_defaults(speculation: SpeculationPlan | None) -> dict[str, object]:
    defaults: dict[str, object] = {"disable_cuda_graph": True}
    if speculation is None:
        return defaults | {"attention_backend": "torch_native"}
    keys = (
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    )
    return defaults | dict.fromkeys(keys, _CPU_TREE_BACKEND)


def free_port(rank: int) -> int:
    """Return a free port of the rank's own range. RuntimeError if none is free."""
    start = _FIRST_PORT + rank % _RANKS_PER_NODE * _PORTS_PER_RANK
    for port in range(start, start + _PORTS_PER_RANK):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"ports {start}-{port} of rank {rank}: one must be free")
