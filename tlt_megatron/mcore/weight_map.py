"""Maps Hugging Face names and layouts to Megatron's, for Llama, Mistral, Qwen2, Qwen3 and
Qwen3-MoE.

There is one row per Megatron parameter: its name, its Hugging Face tensors, and its split over
tensor-parallel ranks. A second name is Transformer Engine's, which fuses a norm into the linear
layer behind it. `split` and `merge` are inverses: `load_hf_weights` uses `split`,
`export.iter_hf_weights` uses `merge`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tlt_megatron.config.model_shape import ROUTER_BIAS, ModelConfig, tensor_shapes
from tlt_megatron.mcore.value_head import ValueHead
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.process_groups import Group, ProcessGroups

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class Layout(Enum):
    """How a parameter is built from Hugging Face tensors and split over tensor-parallel ranks."""

    WHOLE = auto()  # the same on every rank
    ROWS = auto()  # cut along dim 0; of gate and up: a rank's rows of gate, then its rows of up
    COLUMNS = auto()  # cut along dim 1
    QKV = auto()  # per kv head: its query heads, key head, value head; split between kv heads


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter."""

    mcore_names: tuple[str, ...]  # the first one that the model has is used
    hf_names: tuple[str, ...]
    layout: Layout
    is_expert: bool = False  # one rank of the expert-parallel group has all of it

    @property
    def is_float32(self) -> bool:
        """Return whether it is a buffer in float32, whatever the model's dtype."""
        return self.hf_names[0].endswith(ROUTER_BIAS)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER_ROWS = (
    Row(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("input_layernorm.weight",),
        Layout.WHOLE,
    ),
    Row(("self_attention.linear_qkv.weight",), tuple(f"{n}.weight" for n in _QKV), Layout.QKV),
    Row(("self_attention.linear_qkv.bias",), tuple(f"{n}.bias" for n in _QKV), Layout.QKV),
    Row(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",), Layout.WHOLE),
    Row(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",), Layout.WHOLE),
    Row(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), Layout.COLUMNS),
    Row(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("post_attention_layernorm.weight",),
        Layout.WHOLE,
    ),
    Row(("mlp.linear_fc1.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight"), Layout.ROWS),
    Row(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), Layout.COLUMNS),
    Row(("mlp.router.weight",), ("mlp.gate.weight",), Layout.WHOLE),
    Row(
        ("mlp.shared_experts.linear_fc1.weight",),
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        Layout.ROWS,
    ),
    Row(
        ("mlp.shared_experts.linear_fc2.weight",),
        ("mlp.shared_experts.down_proj.weight",),
        Layout.COLUMNS,
    ),
    Row(("mlp.router.expert_bias",), (f"mlp.gate.{ROUTER_BIAS}",), Layout.WHOLE),
)
EMBEDDING_ROW = Row(
    ("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Layout.ROWS
)
# Hugging Face has no tensor for it: it keeps its initial value
VALUE_HEAD_ROW = Row(("output_layer.weight",), (), Layout.WHOLE)
FINAL_NORM_ROW = Row(("decoder.final_layernorm.weight",), ("model.norm.weight",), Layout.WHOLE)


def layer_rows(config: ModelConfig, local_index: int, layer: int) -> list[Row]:
    """Return the rows of `layer` (of the model), which has index `local_index` in its chunk."""
    rows = [
        Row(
            tuple(f"decoder.layers.{local_index}.{name}" for name in row.mcore_names),
            tuple(f"model.layers.{layer}.{name}" for name in row.hf_names),
            row.layout,
        )
        for row in _LAYER_ROWS
    ]
    return [row for row in rows if row.hf_names[0] in _shapes(config)]


def expert_rows(
    config: ModelConfig, local_index: int, layer: int, local_expert: int, ep: Group, rank: int
) -> list[Row]:
    """Return the rows of expert `local_expert` of the expert-parallel `rank` in a layer."""
    assert config.experts is not None
    expert = config.experts.num_experts // ep.size * rank + local_expert
    mcore, hf = f"decoder.layers.{local_index}.mlp.experts", f"model.layers.{layer}.mlp.experts"

    def row(name: str, parts: Sequence[str], layout: Layout) -> Row:
        return Row(
            # names in a SequentialMLP, and in Transformer Engine's grouped one
            (
                f"{mcore}.local_experts.{local_expert}.{name}.weight",
                f"{mcore}.{name}.weight{local_expert}",
            ),
            tuple(f"{hf}.{expert}.{part}_proj.weight" for part in parts),
            layout,
            is_expert=True,
        )

    return [
        row("linear_fc1", ("gate", "up"), Layout.ROWS),
        row("linear_fc2", ("down",), Layout.WHOLE),
    ]


def num_local_experts(config: ModelConfig, layer: int, ep: Group) -> int:
    """Return the experts of a layer that each expert-parallel rank has; 0 in a dense layer."""
    if config.experts is None or not config.has_experts_in(layer):
        return 0
    return config.experts.num_experts // ep.size


def lm_head_row(config: ModelConfig) -> Row:
    """Return the row of the output layer; with tied embeddings, a copy of the embedding."""
    name = EMBEDDING_ROW.hf_names[0] if config.tie_word_embeddings else "lm_head.weight"
    return Row(("output_layer.weight",), (name,), Layout.ROWS)


def chunk_layers(model: GPTModel) -> list[int]:
    """Return the layers of a chunk of this stage, counted over the whole model, in order."""
    layers = list[Any](model.decoder.layers)  # TransformerLayers; a ModuleList does not say so
    return [layer.layer_number - 1 for layer in layers]


def chunk_rows(model: GPTModel, config: ModelConfig, ep: Group) -> list[Row]:
    """Return all rows of a chunk of this rank's stage, in layer order, with its own experts."""
    rows = [EMBEDDING_ROW] if model.pre_process else []
    for local_index, layer in enumerate(chunk_layers(model)):
        rows += layer_rows(config, local_index, layer)
        for expert in range(num_local_experts(config, layer, ep)):
            rows += expert_rows(config, local_index, layer, expert, ep, ep.rank)
    if model.post_process:
        rows.append(FINAL_NORM_ROW)
        if isinstance(model.output_layer, ValueHead):
            rows.append(VALUE_HEAD_ROW)
        elif not (model.pre_process and config.tie_word_embeddings):
            rows.append(lm_head_row(config))
    return rows


def hf_shapes(row: Row, config: ModelConfig) -> list[tuple[int, ...]]:
    """Return the full shape of each Hugging Face tensor of `row`."""
    return [_shapes(config)[name] for name in row.hf_names]


@cache
def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(config)


def shard_shape(row: Row, config: ModelConfig, tp_size: int) -> torch.Size:
    """Return the shape of the Megatron parameter on one tensor-parallel rank."""
    tensors = [torch.empty(shape, device="meta") for shape in hf_shapes(row, config)]
    return split(row, tensors, config, 0, tp_size).shape


def split(
    row: Row, tensors: Sequence[Tensor], config: ModelConfig, tp_rank: int, tp_size: int
) -> Tensor:
    """Return rank `tp_rank`'s shard of the parameter built from the full `tensors`."""
    if row.is_expert:
        tp_rank, tp_size = 0, 1
    if row.layout is Layout.WHOLE:
        return tensors[0]
    if row.layout is Layout.COLUMNS:
        return tensors[0].chunk(tp_size, dim=1)[tp_rank]
    parts = [tensor.chunk(tp_size, dim=0)[tp_rank] for tensor in tensors]
    return fuse(row, parts, config.num_kv_heads // tp_size)


def fuse(row: Row, parts: Sequence[Tensor], num_kv_heads: int) -> Tensor:
    """Return a rank's parameter from the rank's part of each tensor, with `num_kv_heads` heads."""
    if row.layout is Layout.QKV:
        parts = [part.unflatten(0, (num_kv_heads, -1)) for part in parts]
        return torch.cat(parts, dim=1).flatten(0, 1)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def merge(row: Row, shards: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
    """Return the full, contiguous Hugging Face tensors of `row` from the shards of all ranks."""
    if row.layout is Layout.WHOLE:
        full = [shards[0]]
    elif row.layout is Layout.COLUMNS:
        full = [_joined(shards, dim=1)]
    elif row.layout is Layout.QKV:
        groups = _joined(shards).unflatten(0, (config.num_kv_heads, -1))
        sizes = [shape[0] // config.num_kv_heads for shape in hf_shapes(row, config)]
        full = [part.flatten(0, 1) for part in groups.split(sizes, dim=1)]
    else:
        parts = [shard.chunk(len(row.hf_names), dim=0) for shard in shards]
        full = [_joined(tensors) for tensors in zip(*parts, strict=True)]
    return [tensor.contiguous() for tensor in full]


def _joined(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate the shards. A single shard is returned without a copy."""
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)


def find_parameter(row: Row, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the model's parameter for `row`, which has one of the known names."""
    (found,) = [parameters[name] for name in row.mcore_names if name in parameters]
    return found


def named_tensors(model: GPTModel) -> dict[str, Tensor]:
    """Return what the rows name: the parameters, and the biases of routers, which are buffers."""
    biases = {name: b for name, b in model.named_buffers() if name.endswith(".expert_bias")}
    return dict(model.named_parameters()) | biases


def load_hf_weights(
    stage: Sequence[GPTModel], config: ModelConfig, source: HfReader, groups: ProcessGroups
) -> None:
    """Fill this rank's shard of the unwrapped chunks of a stage from `source`, reading only those.

    `config/model_folder.py` has compared names and shapes, and a tied embedding with its output
    layer.
    """
    for chunk in stage:
        _load_chunk(chunk, config, source, groups)


def _load_chunk(
    model: GPTModel, config: ModelConfig, source: HfReader, groups: ProcessGroups
) -> None:
    parameters = named_tensors(model)
    rows = chunk_rows(model, config, groups.ep)
    assert parameters.keys() <= {name for row in rows for name in row.mcore_names}
    for row in rows:
        if row is VALUE_HEAD_ROW:
            continue
        parameter = find_parameter(row, parameters)
        tensors = [source[name] for name in row.hf_names]
        shard = split(row, tensors, config, groups.tp.rank, groups.tp.size)
        assert shard.shape == parameter.shape, (row.mcore_names, shard.shape, parameter.shape)
        if row.is_float32:  # Megatron rounds it with the parameters, before its first pass
            parameter.data = parameter.data.float()
        parameter.data.copy_(shard)
