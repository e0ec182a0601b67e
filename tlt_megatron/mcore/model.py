"""Builds this rank's pipeline stage of the policy: a Megatron GPTModel for each of its chunks.

Weights are random until `weight_map.load_hf_weights` fills them. With CUDA, Transformer Engine and
bfloat16, the layers are Transformer Engine's. Otherwise they are Megatron's local layers with our
attention and norm. Both have the same parameters, under names that `weight_map` knows.
"""

from __future__ import annotations

import importlib.metadata
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from tlt_megatron.config.schema import McoreSection, ParallelSection
from tlt_megatron.mcore import cpu, transformer_engine
from tlt_megatron.mcore.value_head import ValueHead
from tlt_megatron.models.config import ExpertsConfig, ModelConfig
from tlt_megatron.models.layers import rope_frequencies
from tlt_megatron.runtime.device import Device, has_loops

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},  # the attention of each layer
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


# The least compute capability of each recipe: Ada, Hopper, Blackwell.
_FP8_CAPABILITY = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}


def import_problem() -> str:
    """Return why Megatron's layers cannot be imported; "" if they can.

    They import what they find, such as SGLang's kernels, which fail without a GPU's driver.
    """
    try:
        cpu.install()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    except Exception as error:  # any package that is imported may raise it
        reason = error.__cause__ or error
        return f"cannot be imported: {type(reason).__name__}: {reason}"
    return ""


def has_transformer_engine(dtype: torch.dtype) -> bool:
    """Return whether the layers will be Transformer Engine's. ValueError if it is there and broken.

    It has no float32 attention for packed sequences.
    """
    if not (torch.cuda.is_available() and dtype == torch.bfloat16):
        return False
    if not transformer_engine.installed_version():
        return False
    if reason := transformer_engine.problem():
        raise ValueError(
            f"transformer-engine {reason}. Mend it or uninstall it (python -m tlt_megatron.doctor)"
        )
    return True


def build_stage(
    config: ModelConfig,
    *,
    parallel: ParallelSection,
    section: McoreSection,
    dtype: torch.dtype,
    device: Device,
    has_value_head: bool = False,
    experts_apart: bool = False,
) -> list[GPTModel]:
    """Build this rank's pipeline stage: the embedding on the first, the output layer on the last.

    It is one model, or the `parallel.virtual_pipeline` chunks whose passes are interleaved.

    Needs `initialize_model_parallel`. Every rank must call it. The output [B, T, V / tp] is this
    rank's shard of the vocabulary; with `has_value_head` it is one value per position, [B, T, 1],
    and the embedding is not tied. With `experts_apart` every expert has linears of its own, where a
    GPU would compute all of them at once. ValueError for a setting or a model that Megatron cannot
    represent.
    """
    transformer = transformer_config(
        config, parallel=parallel, section=section, dtype=dtype, device=device
    )
    transformer.moe_grouped_gemm &= not experts_apart
    chunks = [None] if parallel.virtual_size is None else range(parallel.virtual_pipeline)
    return [
        _build_chunk(config, transformer, chunk, has_value_head).to(device.torch_device)
        for chunk in chunks
    ]


def _build_chunk(
    config: ModelConfig, transformer: TransformerConfig, chunk: int | None, has_value_head: bool
) -> GPTModel:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk}
    model = GPTModel(
        transformer,
        _block_spec(transformer, chunk),  # pyright: ignore[reportArgumentType]  # Megatron takes it too
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=chunk,
        parallel_output=True,
        share_embeddings_and_output_weights=config.tie_word_embeddings and not has_value_head,
        position_embedding_type="rope",
    )
    # Megatron's own scalings fix numbers that config.json may set otherwise.
    rotary = model.rotary_pos_emb
    frequencies = rope_frequencies(config.rope, config.rotary_dim, torch.float32)
    rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
    if has_value_head and model.post_process:
        # frees the layer that Megatron made; annotated as that layer's class
        model.output_layer = ValueHead(transformer)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def transformer_config(
    config: ModelConfig,
    *,
    parallel: ParallelSection,
    section: McoreSection,
    dtype: torch.dtype,
    device: Device,
) -> TransformerConfig:
    """Return Megatron's configuration of `config`. `section.transformer` replaces our fields."""
    if device.is_cuda != torch.cuda.is_available():
        raise ValueError(
            f"run.device={device.torch_device.type!r}: Megatron uses the GPU wherever torch sees one; "
            "hide it with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    cpu.install()
    from megatron.core.transformer import TransformerConfig

    # Megatron's fused gate of an expert computes other numbers.
    has_gate_loop = config.experts is None and has_loops(device.torch_device)
    fields = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_size,
        # Two stages send each other two tensors at a time, so each message is one of its own.
        "overlap_p2p_comm": parallel.virtual_size is not None,
        "batch_p2p_comm": parallel.virtual_size is None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.tensor > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": True,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # required by variable_seq_lengths, also for dense models
        # Interleaved passes free what they send before it is sent. Only CUDA's allocator waits.
        "deallocate_pipeline_outputs": parallel.virtual_size is None or device.is_cuda,
        "bias_activation_fusion": device.is_cuda or has_gate_loop,
        "bias_dropout_fusion": device.is_cuda,
        "apply_rope_fusion": has_transformer_engine(dtype),
        "masked_softmax_fusion": False,  # needs Megatron's CUDA extensions; so does the next
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "attention_softmax_in_fp32": True,
    }
    balancing: dict[str, Any] = {}
    if config.experts is not None:
        if device.is_cuda and not has_transformer_engine(dtype):
            raise ValueError(
                "a mixture of experts on a GPU needs model.dtype=bfloat16 and transformer-engine, whose kernels"
                " compute all experts of a rank at once"
            )
        fields |= _expert_fields(config.experts, config.num_layers)
        fields["moe_grouped_gemm"] = device.is_cuda
        if section.moe_aux_loss_coeff:
            # Megatron 0.16.1 multiplies the loss by the tokens of this rank, a share of the
            # micro-batch under sequence and context parallelism; 0.19.2 by those of all ranks.
            is_share = Version(importlib.metadata.version("megatron-core")) < Version("0.19")
            num_shares = parallel.tensor * parallel.context if is_share else 1
            balancing["moe_aux_loss_coeff"] = section.moe_aux_loss_coeff * num_shares
            balancing["moe_router_load_balancing_type"] = "aux_loss"
    fields = _architecture_fields(config) | fields | _RECOMPUTE[section.recompute]
    fields |= fp8_fields(section, dtype)
    transformer = TransformerConfig(**fields | section.transformer | balancing)
    if config.rope.attention_factor != 1.0:
        # Megatron reads these three if they are there, and computes the factor from them: 0.1 *
        # mscale * log(e) + 1. Its fused kernel cannot apply the factor.
        scaling = {
            "yarn_rotary_scaling_factor": math.e,
            "yarn_mscale": 10.0 * (config.rope.attention_factor - 1.0),
            "yarn_mscale_all_dim": 0.0,
            "apply_rope_fusion": False,
        }
        vars(transformer).update(scaling)
    return transformer


def fp8_fields(section: McoreSection, dtype: torch.dtype) -> dict[str, Any]:
    """Return Megatron's settings for FP8. ValueError if this rank's GPU or Transformer Engine does
    not support it.

    Each tensor's scale is computed from that tensor, so a pass gives the same numbers after a
    resume.
    """
    if "fp8" not in section.transformer:
        return {}
    format_name = section.transformer["fp8"]
    recipe = section.transformer.get("fp8_recipe", "tensorwise")
    if not has_transformer_engine(dtype):
        raise ValueError(
            f"mcore.transformer.fp8={format_name!r}: must be absent without a GPU, transformer-engine and model.dtype=bfloat16"
        )
    least, own = _FP8_CAPABILITY[recipe], torch.cuda.get_device_capability()
    if own < least:
        raise ValueError(
            f"mcore.transformer.fp8_recipe={recipe!r}: needs a GPU of compute capability"
            f" {'.'.join(map(str, least))}, this one has {'.'.join(map(str, own))}"
        )
    return {"fp8": format_name, "fp8_recipe": recipe}


def _architecture_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.has_qkv_bias,
        "qk_layernorm": config.has_qk_norm,
        "rotary_interleaved": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _expert_fields(experts: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_per_token,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(num_layers)],
        # Megatron's softmax is over all experts, or over the chosen ones, which normalizes.
        "moe_router_pre_softmax": not experts.normalizes,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid" if experts.is_sigmoid else "softmax",
        "moe_router_enable_expert_bias": experts.is_sigmoid,
        "moe_router_bias_update_rate": 0.0,  # the bias of the folder stays
        "moe_router_topk_scaling_factor": experts.scaling,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
    }


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm for the local layers. Megatron's own wrapper refuses sequence parallelism.

    Under sequence parallelism a rank sees only its part of the sequence. The weight then carries
    Megatron's mark for "sum my gradient over the tensor-parallel ranks". Megatron recognizes query
    and key norms by name.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not has_loops(x.device) or x.dtype != self.weight.dtype:
            return super().forward(x)
        # Imported when needed: the installation may lack numba.
        from tlt_megatron.mcore.layer_gradients import Norm

        return Norm.apply(x, self.weight, self.eps)


def _block_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """Return the specs of the layers of this stage's chunk, and of the norm behind the last one."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    has_engine = has_transformer_engine(config.params_dtype)
    layers: Any = gpt_layer_specs.get_gpt_decoder_layer_specs(  # annotated as the block
        config, use_transformer_engine=has_engine, normalization="RMSNorm"
    )
    if has_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        norm: Any = TENorm  # Megatron's annotations know no plain class
    else:
        from tlt_megatron.mcore.attention import SdpaCoreAttention

        norm = RMSNorm
        for layer in layers:
            parts: Any = layer.submodules  # annotated as object
            parts.input_layernorm = parts.pre_mlp_layernorm = norm
            attention = parts.self_attention.submodules
            attention.core_attention = SdpaCoreAttention
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = norm
    first = get_transformer_layer_offset(config, chunk)
    own = layers[first : first + get_num_layers_to_build(config, chunk)]
    return TransformerBlockSubmodules(layer_specs=own, layer_norm=norm)
