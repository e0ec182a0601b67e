"""Maps Hugging Face names and layouts to Megatron's, for Llama, Qwen2 and Qwen3, and loads weights through the map.

There is one row per Megatron parameter. It holds the parameter's name, its Hugging Face tensors, their sizes, and its split
over tensor-parallel ranks. A second name is Transformer Engine's, which fuses a norm into the linear layer behind it. `split`
and `merge` are inverses: `load_hf_weights` uses `split`, `export.iter_hf_weights` uses `merge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import ProcessGroups

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class Layout(Enum):
    """How a Megatron parameter is built from its Hugging Face tensors and split over the tensor-parallel ranks."""

    WHOLE = auto()  # the same on every rank
    ROWS = auto()  # cut along dim 0
    COLUMNS = auto()  # cut along dim 1
    QKV = auto()  # per kv head: its query heads, key head, value head; split between kv heads
    GATE_UP = auto()  # a rank's rows of gate, then its rows of up


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One Megatron parameter. Sizes use the project's shape letters; NH and KH are N*H and K*H."""

    mcore_names: tuple[str, ...]  # the first one that the model has is used
    hf_names: tuple[str, ...]
    hf_sizes: tuple[tuple[str, ...], ...]  # of each Hugging Face tensor
    layout: Layout
    needs: str = ""  # the ModelConfig switch that the row depends on


_QKV_BIAS = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
_QKV_WEIGHT = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_LAYER_ROWS = (
    Row(
        mcore_names=("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        hf_names=("input_layernorm.weight",),
        hf_sizes=(("D",),),
        layout=Layout.WHOLE,
    ),
    Row(
        mcore_names=("self_attention.linear_qkv.weight",),
        hf_names=_QKV_WEIGHT,
        hf_sizes=(("NH", "D"), ("KH", "D"), ("KH", "D")),
        layout=Layout.QKV,
    ),
    Row(
        mcore_names=("self_attention.linear_qkv.bias",),
        hf_names=_QKV_BIAS,
        hf_sizes=(("NH",), ("KH",), ("KH",)),
        layout=Layout.QKV,
        needs="has_qkv_bias",
    ),
    Row(
        mcore_names=("self_attention.q_layernorm.weight",),
        hf_names=("self_attn.q_norm.weight",),
        hf_sizes=(("H",),),
        layout=Layout.WHOLE,
        needs="has_qk_norm",
    ),
    Row(
        mcore_names=("self_attention.k_layernorm.weight",),
        hf_names=("self_attn.k_norm.weight",),
        hf_sizes=(("H",),),
        layout=Layout.WHOLE,
        needs="has_qk_norm",
    ),
    Row(
        mcore_names=("self_attention.linear_proj.weight",),
        hf_names=("self_attn.o_proj.weight",),
        hf_sizes=(("D", "NH"),),
        layout=Layout.COLUMNS,
    ),
    Row(
        mcore_names=("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        hf_names=("post_attention_layernorm.weight",),
        hf_sizes=(("D",),),
        layout=Layout.WHOLE,
    ),
    Row(
        mcore_names=("mlp.linear_fc1.weight",),
        hf_names=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        hf_sizes=(("F", "D"), ("F", "D")),
        layout=Layout.GATE_UP,
    ),
    Row(
        mcore_names=("mlp.linear_fc2.weight",),
        hf_names=("mlp.down_proj.weight",),
        hf_sizes=(("D", "F"),),
        layout=Layout.COLUMNS,
    ),
)
EMBEDDING_ROW = Row(
    mcore_names=("embedding.word_embeddings.weight",),
    hf_names=("model.embed_tokens.weight",),
    hf_sizes=(("V", "D"),),
    layout=Layout.ROWS,
)
FINAL_NORM_ROW = Row(
    mcore_names=("decoder.final_layernorm.weight",),
    hf_names=("model.norm.weight",),
    hf_sizes=(("D",),),
    layout=Layout.WHOLE,
)
_LM_HEAD_SIZES = (("V", "D"),)


def layer_rows(config: ModelConfig, local_index: int, layer: int) -> list[Row]:
    """Return the rows of `layer` (counted over the model), which has index `local_index` on its stage."""
    return [
        Row(
            mcore_names=tuple(f"decoder.layers.{local_index}.{name}" for name in row.mcore_names),
            hf_names=tuple(f"model.layers.{layer}.{name}" for name in row.hf_names),
            hf_sizes=row.hf_sizes,
            layout=row.layout,
        )
        for row in _LAYER_ROWS
        if not row.needs or getattr(config, row.needs)
    ]


def lm_head_row(config: ModelConfig) -> Row:
    """Return the row of the output layer. With tied embeddings, the last stage holds a copy of the embedding."""
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return Row(
        mcore_names=("output_layer.weight",),
        hf_names=(name,),
        hf_sizes=_LM_HEAD_SIZES,
        layout=Layout.ROWS,
    )


def stage_layers(model: GPTModel) -> list[int]:
    """Return the layers of this stage, counted over the model, in order."""
    return [layer.layer_number - 1 for layer in model.decoder.layers]


def stage_rows(model: GPTModel, config: ModelConfig) -> list[Row]:
    """Return all rows of this rank's stage, in layer order."""
    rows = [EMBEDDING_ROW] if model.pre_process else []
    for local_index, layer in enumerate(stage_layers(model)):
        rows += layer_rows(config, local_index, layer)
    if model.post_process:
        rows.append(FINAL_NORM_ROW)
        if not (model.pre_process and config.tie_word_embeddings):
            rows.append(lm_head_row(config))
    return rows


def hf_shapes(row: Row, config: ModelConfig) -> list[tuple[int, ...]]:
    """Return the full shape of each Hugging Face tensor of `row`."""
    letters = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.ffn_size,
        "H": config.head_dim,
        "NH": config.num_heads * config.head_dim,
        "KH": config.num_kv_heads * config.head_dim,
    }
    return [tuple(letters[letter] for letter in sizes) for sizes in row.hf_sizes]


def shard_shape(row: Row, config: ModelConfig, tp_size: int) -> tuple[int, ...]:
    """Return the shape of the Megatron parameter on one tensor-parallel rank."""
    shapes = hf_shapes(row, config)
    full = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if row.layout is Layout.WHOLE:
        return full
    if row.layout is Layout.COLUMNS:
        return (full[0], full[1] // tp_size)
    return (full[0] // tp_size, *full[1:])


def split(
    row: Row, tensors: Sequence[Tensor], config: ModelConfig, tp_rank: int, tp_size: int
) -> Tensor:
    """Return rank `tp_rank`'s shard of the Megatron parameter built from the full Hugging Face `tensors`."""
    if row.layout is Layout.WHOLE:
        return tensors[0]
    if row.layout is Layout.COLUMNS:
        return tensors[0].chunk(tp_size, dim=1)[tp_rank]
    if row.layout is Layout.QKV:
        heads = config.num_kv_heads // tp_size
        mine = slice(tp_rank * heads, (tp_rank + 1) * heads)
        parts = [t.unflatten(0, (config.num_kv_heads, -1))[mine] for t in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)
    return torch.cat([t.chunk(tp_size, dim=0)[tp_rank] for t in tensors])


def merge(row: Row, shards: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
    """Return the full Hugging Face tensors of `row`, contiguous, from the shards of all tensor-parallel ranks."""
    if row.layout is Layout.WHOLE:
        full = [shards[0]]
    elif row.layout is Layout.COLUMNS:
        full = [_joined(shards, dim=1)]
    elif row.layout is Layout.QKV:
        groups = _joined(shards).unflatten(0, (config.num_kv_heads, -1))
        sizes = [shape[0] // config.num_kv_heads for shape in hf_shapes(row, config)]
        full = [part.flatten(0, 1) for part in groups.split(sizes, dim=1)]
    else:  # ROWS is GATE_UP with one part
        parts = [shard.chunk(len(row.hf_names), dim=0) for shard in shards]
        full = [_joined(tensors) for tensors in zip(*parts, strict=True)]
    return [tensor.contiguous() for tensor in full]


def _joined(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate the shards. A single shard is returned without a copy."""
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)


def find_parameter(row: Row, parameters: dict[str, Tensor]) -> Tensor | None:
    """Return the model's parameter for `row`, or None if it has none under any known name."""
    return next((parameters[name] for name in row.mcore_names if name in parameters), None)


def load_hf_weights(
    model: GPTModel, config: ModelConfig, source: HfReader, groups: ProcessGroups
) -> None:
    """Fill this rank's shard of the unwrapped `model` from `source`. Reads only the tensors of its own stage.

    Every rank must call it. ValueError, the same on every rank, lists all problems: missing tensors, wrong shapes, parameters
    that the table does not know, and a separate output layer when embeddings are tied.
    """
    parameters = dict(model.named_parameters())
    rows = stage_rows(model, config)
    unknown = parameters.keys() - {name for row in rows for name in row.mcore_names}
    problems = [f"Megatron's {name} has no Hugging Face counterpart" for name in unknown]
    for row in rows:
        parameter = find_parameter(row, parameters)
        tensors = _read(row, config, source, problems)
        if parameter is None:
            problems.append(f"Megatron's model has no {' or '.join(row.mcore_names)}")
        elif tensors is not None:
            shard = split(row, tensors, config, groups.tp.rank, groups.tp.size)
            assert shard.shape == parameter.shape, (row.mcore_names, shard.shape, parameter.shape)
            parameter.data.copy_(shard)
    if groups.world.is_first:
        problems += _untied_head(config, source)
    # All ranks raise together, so that no rank enters a collective that a failed rank will never join.
    found = sorted({problem for rank in gather_objects(problems, groups.world) for problem in rank})
    if found:
        raise ValueError(f"model.path={str(source.path)!r}: {'; '.join(found)}")


def _untied_head(config: ModelConfig, source: HfReader) -> list[str]:
    """Return a problem if embeddings are tied but the files hold an output layer that differs from the embedding."""
    head, embedding = "lm_head.weight", EMBEDDING_ROW.hf_names[0]
    if not config.tie_word_embeddings or head not in source or embedding not in source:
        return []
    if torch.equal(source[head].float(), source[embedding].float()):
        return []
    return [
        f"tie_word_embeddings=true, but {head} is not {embedding}: set it to false in config.json, or remove {head}"
    ]


def _read(
    row: Row, config: ModelConfig, source: HfReader, problems: list[str]
) -> list[Tensor] | None:
    """Return the row's tensors, or None after appending what is wrong to `problems`."""
    tensors = []
    for name, shape in zip(row.hf_names, hf_shapes(row, config), strict=True):
        if name not in source:
            problems.append(f"{name} is missing")
            continue
        tensor = source[name]
        if tuple(tensor.shape) != shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, must be {list(shape)}")
            continue
        tensors.append(tensor)
    return tensors if len(tensors) == len(row.hf_names) else None
