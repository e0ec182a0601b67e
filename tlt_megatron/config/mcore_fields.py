"""The fields of Megatron's TransformerConfig that `mcore.transformer` may set.

They change only how and where the same numbers are computed. A list of forbidden fields could miss
one of some 230 that changes the model: the trained policy would differ from the one that rolls out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_STAGE_FIELDS = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_ALLOWED = {
    "which kernels compute a layer": """
        apply_rope_fusion bias_activation_fusion bias_dropout_fusion fused_single_qkv_rope
        gradient_accumulation_fusion masked_softmax_fusion memory_efficient_layer_norm
        persist_layer_norm use_te_activation_func
    """,
    "precision of intermediate values": """
        attention_softmax_in_fp32 deterministic_mode disable_bf16_reduced_precision_matmul
    """,
    "activations: recomputed or moved away": """
        cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering
        cpu_offloading_num_layers cpu_offloading_weights distribute_saved_activations
        fine_grained_activation_offloading min_offloaded_tensor_size offload_modules
        recompute_method recompute_modules recompute_num_layers
    """,
    "communication and its overlap": """
        async_tensor_model_parallel_allreduce batch_p2p_comm batch_p2p_sync
        clone_scatter_output_in_embedding deallocate_pipeline_outputs
        defer_embedding_wgrad_compute delay_wgrad_compute disable_parameter_transpose_cache
        overlap_p2p_comm symmetric_ar_type tp_comm_atomic_ag tp_comm_atomic_rs
        tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
        tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv
        tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
        use_ring_exchange_p2p wgrad_deferral_limit
    """,
    "which pipeline stage holds which layers": " ".join(_STAGE_FIELDS),
    "debugging": """
        barrier_with_L1_time config_logger_dir
    """,
}
ALLOWED_FIELDS = frozenset(" ".join(_ALLOWED.values()).split())
# Fields that another setting controls, or whose value this package relies on -> what to do instead.
_INSTEAD = {
    "tensor_model_parallel_size": "set parallel.tensor",
    "pipeline_model_parallel_size": "set parallel.pipeline",
    "sequence_parallel": "set parallel.sequence",
    "params_dtype": "set model.dtype",
    "pipeline_dtype": "set model.dtype",
    "bf16": "set model.dtype",
    "fp16": "set model.dtype=bfloat16",
    "recompute_granularity": "set mcore.recompute",
    "perform_initialization": "without it Megatron leaves out the marks of tensor-parallel parameters, and gradient norms are wrong",
    "calculate_per_token_loss": "the loss is always summed over tokens and divided by their count",
    "variable_seq_lengths": "micro-batches are packed, so their lengths always vary",
    "context_parallel_size": "context parallelism is not supported",
    "virtual_pipeline_model_parallel_size": "interleaved pipeline stages are not supported",
    "hidden_dropout": "with dropout the log-probs before and in an update are of two policies",
    "attention_dropout": "with dropout the log-probs before and in an update are of two policies",
}


def check_transformer_fields(fields: Mapping[str, object]) -> None:
    """Raise ValueError for a field that is not allowed, and say what to do instead."""
    for name, value in fields.items():
        if name in ALLOWED_FIELDS:
            continue
        if name in _INSTEAD:
            raise ValueError(f"mcore.transformer.{name}={value!r}: not allowed; {_INSTEAD[name]}")
        near = difflib.get_close_matches(str(name), ALLOWED_FIELDS, n=1, cutoff=0.9)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"mcore.transformer.{name}={value!r}: not allowed{meant}; the model is that of model.path, and only "
            "kernels, fusions, memory, communication and pipeline stages may be set (tlt_megatron/config/mcore_fields.py lists them)"
        )


def layers_of_stages(
    num_layers: int, pipeline: int, fields: Mapping[str, Any], *, path: str = ""
) -> list[int]:
    """Return the layers of each pipeline stage, as Megatron distributes those of the model `path`.

    Example: 9 layers on 3 stages with `num_layers_in_first_pipeline_stage=1` give `[1, 4, 4]`. ValueError if the stages
    between cannot have the same number.
    """
    given = {name: n for name in _STAGE_FIELDS if (n := fields.get(name)) is not None}
    for name, count in given.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"mcore.transformer.{name}={count!r}: must be an integer >= 1")
        if pipeline == 1:
            raise ValueError(
                f"mcore.transformer.{name}={count}: must be null with parallel.pipeline=1"
            )
    if not given:
        if num_layers % pipeline:
            raise ValueError(
                f"parallel.pipeline={pipeline} does not divide num_hidden_layers={num_layers} of {path}"
            )
        return [num_layers // pipeline] * pipeline
    rest, stages = num_layers - sum(given.values()), pipeline - len(given)
    is_even = rest == 0 if not stages else rest >= stages and rest % stages == 0
    if not is_even:
        settings = "".join(f" and mcore.transformer.{name}={n}" for name, n in given.items())
        raise ValueError(
            f"parallel.pipeline={pipeline}{settings} leave {rest} of num_hidden_layers={num_layers} of {path} for "
            f"{stages} stages: must be the same number, at least 1, for each"
        )
    first, last = ([given[name]] if name in given else [] for name in _STAGE_FIELDS)
    return [*first, *[rest // max(stages, 1)] * stages, *last]
