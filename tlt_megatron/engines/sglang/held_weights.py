"""Reads the weights of an SGLang model under Hugging Face names, for the checksum of an update.

Runs in SGLang's scheduler processes. It reads the parameters that the forward pass uses, so the
checksum detects a lost or misplaced tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tlt_megatron.config.own_layer import is_frozen
from tlt_megatron.models.hf_io import dtype_of

_OWN_LAYER = re.compile(r"^model\.(mtp_block\.|decoder\.)?")  # SGLang's names of a layer for MTP


def named_held_tensors(model: nn.Module, *, is_draft: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by name. A drafter's leave out the embedding and LM head of the target.
    All tensor-parallel ranks must call it.

    They have the dtype in which they were sent: SGLang keeps some routers in float32.
    """
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    dtype = next(model.parameters()).dtype
    is_eagle3 = is_draft and "Eagle3" in type(model).__name__
    for module_name, module in model.named_modules():
        if is_draft and isinstance(module, VocabParallelEmbedding):
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{kind}"
            if own := _own_prefix(model):
                if is_frozen(name):
                    continue
                name = _OWN_LAYER.sub(own, name)
            elif is_draft:
                name = name.removeprefix("model.")
            if is_eagle3:
                name = name.replace("layers.0.", "midlayer.")
            for part, tensor in _parts(name, kind, module, parameter.detach()):
                yield part, tensor.to(dtype_of(part, dtype))


def _own_prefix(model: nn.Module) -> str:
    """Return the checkpoint's prefix of the layer for MTP that an SGLang model is; "": it is
    none.
    """
    if type(model).__name__ == "MiMoMTP":
        return "model.mtp_layers.0."
    if type(model).__name__ == "Glm4MoeForCausalLMNextN":
        config: Any = model.config
        return f"model.layers.{config.num_hidden_layers}."
    return ""


def _parts(name: str, kind: str, module: Any, shard: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors of one parameter."""
    from sglang.srt.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, QKVParallelLinear):
        sizes = (module.q_proj_shard_size, module.kv_proj_shard_size, module.v_proj_shard_size)
        copies = (1, module.num_kv_head_replicas, module.num_kv_head_replicas)
        for part, piece, num_copies in zip("qkv", shard.split(sizes), copies, strict=True):
            yield name.replace("qkv_proj", f"{part}_proj"), _gather(piece, 0, num_copies)
    elif isinstance(module, MergedColumnParallelLinear):
        gate, up = shard.chunk(2)
        yield name.replace("gate_up_proj", "gate_proj"), _gather(gate, 0)
        yield name.replace("gate_up_proj", "up_proj"), _gather(up, 0)
    elif isinstance(module, RowParallelLinear):
        yield name, _gather(shard, 1) if kind == "weight" else shard
    elif isinstance(module, FusedMoE):
        projections = {"w13_weight": ("gate", "up"), "w2_weight": ("down",)}[kind]
        cut = 2 if kind == "w2_weight" else 1
        whole = [_gather(part, cut) for part in shard.chunk(len(projections), dim=1)]
        for expert, tensors in enumerate(zip(*whole, strict=True)):
            for projection, tensor in zip(projections, tensors, strict=True):
                yield name.replace(kind, f"{expert}.{projection}_proj.weight"), tensor
    elif isinstance(module, VocabParallelEmbedding):
        yield name, _gather(shard, 0)[: module.org_vocab_size]
    else:
        yield name, shard


def _gather(shard: Tensor, dim: int, num_copies: int = 1) -> Tensor:
    """Return the whole tensor. KV heads that `num_copies` ranks share are taken once."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size == 1:
        return shard
    shards = [torch.empty_like(shard) for _ in range(group.world_size)]
    torch.distributed.all_gather(shards, shard.contiguous(), group=group.device_group)
    return torch.cat(shards[::num_copies], dim=dim)
