"""Gathers Megatron shards into full Hugging Face tensors on every rank, for weight sync and HF
checkpoints.

It exports one layer at a time. The owning stage packs the rank's shards into one flat buffer and
broadcasts it to the pipeline group, so each rank receives 1/tp of a layer. The tensor-parallel
group then gathers the parts. This takes two collectives per layer. Experts follow in the same way,
one of each expert-parallel rank at a time. A layer is broadcast while the one before it is used, so
memory is bounded by two layers or embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tlt_megatron.mcore.lora import AdaptedLinear, adapted_linears
from tlt_megatron.mcore.weight_map import (
    EMBEDDING_ROW,
    FINAL_NORM_ROW,
    Row,
    chunk_layers,
    expert_rows,
    find_parameter,
    layer_rows,
    lm_head_row,
    merge,
    named_tensors,
    num_local_experts,
    shard_shape,
)
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import Group, ProcessGroups

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def iter_hf_weights(
    stage: Sequence[GPTModel],
    config: ModelConfig,
    groups: ProcessGroups,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the policy under its Hugging Face name, in layer order, on `device`.

    Every step is a collective: all ranks must run the iterator to its end. The tensors are copies
    in the model's dtype. A tied output layer is not exported. Frozen weights may be in host memory.
    """
    parameters = [named_tensors(chunk) for chunk in stage]
    adapted = [dict(adapted_linears([chunk])) for chunk in stage]
    policy_dtype = next(stage[0].parameters()).dtype
    sent: _Sent | None = None
    for owner, chunk, rows_of_ranks in _blocks(stage, config, groups):
        has_experts = rows_of_ranks[0][0].is_expert
        group = groups.ep if has_experts else groups.tp
        rows = rows_of_ranks[group.rank if has_experts else 0]
        dtype = torch.float32 if rows[0].is_float32 else policy_dtype
        num_elements = sum(shard_shape(row, config, groups.tp.size).numel() for row in rows)
        if owner == groups.pp.rank:
            own = (_current(row, parameters[chunk], adapted[chunk]).to(device) for row in rows)
            flat = torch.cat([parameter.detach().flatten() for parameter in own])  # a copy
            assert (flat.dtype, flat.numel()) == (dtype, num_elements), rows[0].mcore_names
        else:
            flat = torch.empty(num_elements, dtype=dtype, device=device)
        following = _Sent(rows_of_ranks, flat, group, _send(flat, owner, groups.pp))
        if sent is not None:
            yield from sent.tensors(config, groups.tp.size)
        sent = following
    assert sent is not None
    yield from sent.tensors(config, groups.tp.size)


@torch.no_grad()
def _current(
    row: Row, parameters: Mapping[str, Tensor], adapted: Mapping[str, AdaptedLinear]
) -> Tensor:
    """Return the parameter of `row` as a pass uses it, with its adapters."""
    linear = adapted.get(row.mcore_names[0].removesuffix(".weight"))
    return find_parameter(row, parameters) if linear is None else linear.merged_weight()


class _Sent(NamedTuple):
    """A unit on its way through the pipeline group, while the one before it is used."""

    rows_of_ranks: list[list[Row]]
    flat: Tensor
    group: Group
    work: dist.Work | None

    def tensors(self, config: ModelConfig, tp_size: int) -> Iterator[tuple[str, Tensor]]:
        """Gather the shards and yield the Hugging Face tensors."""
        if self.work is not None:
            self.work.wait()
        has_experts = self.rows_of_ranks[0][0].is_expert
        shapes = [shard_shape(row, config, tp_size) for row in self.rows_of_ranks[0]]
        sizes = [shape.numel() for shape in shapes]
        shards = [
            [part.view(shape) for part, shape in zip(rank.split(sizes), shapes, strict=True)]
            for rank in _gather(self.flat, self.group)
        ]
        # An expert is on one rank; of other tensors each rank has a shard.
        parts_of_rows = [[rank] for rank in shards] if has_experts else [shards]
        for rows, ranks in zip(self.rows_of_ranks, parts_of_rows, strict=True):
            for row, *parts in zip(rows, *ranks, strict=True):
                yield from zip(row.hf_names, merge(row, parts, config), strict=True)


def _blocks(
    stage: Sequence[GPTModel], config: ModelConfig, groups: ProcessGroups
) -> Iterator[tuple[int, int, list[list[Row]]]]:
    """Yield (owning pipeline stage, its chunk, the chunk's rows) for each unit of export, in the
    same order on every rank.

    The rows are one list, or those of each expert-parallel rank.
    """
    yield 0, 0, [[EMBEDDING_ROW]]
    ep = groups.ep
    for owner, chunk, local_index, layer in _layers(stage, groups.pp):
        rows = layer_rows(config, local_index, layer)
        yield owner, chunk, [[row for row in rows if not row.is_float32]]
        if biases := [row for row in rows if row.is_float32]:
            yield owner, chunk, [biases]
        for expert in range(num_local_experts(config, layer, ep)):
            yield (
                owner,
                chunk,
                [expert_rows(config, local_index, layer, expert, ep, r) for r in range(ep.size)],
            )
    last = groups.pp.size - 1, len(stage) - 1
    yield *last, [[FINAL_NORM_ROW]]
    if not config.tie_word_embeddings:
        yield *last, [[lm_head_row(config)]]


def _layers(stage: Sequence[GPTModel], pp: Group) -> Iterator[tuple[int, int, int, int]]:
    """Yield (owning pipeline stage, its chunk, index in the chunk, layer), in the order of layers.
    Stages have the layers of their first chunks, one after the other, then those of their second.
    """
    stages = gather_objects([chunk_layers(chunk) for chunk in stage], pp)
    for number, chunks in enumerate(zip(*stages, strict=True)):
        for owner, layers in enumerate(chunks):
            for local_index, layer in enumerate(layers):
                yield owner, number, local_index, layer


def _send(flat: Tensor, stage: int, pp: Group) -> dist.Work | None:
    """Begin to broadcast `flat` of `stage` to the pipeline group. Buffers must be contiguous: gloo
    reads others wrongly.
    """
    if pp.size == 1:
        return None
    return dist.broadcast(flat, src=pp.global_ranks[stage], group=pp.of_torch, async_op=True)


def _gather(flat: Tensor, group: Group) -> list[Tensor]:
    """Return `flat` of every rank of `group`, in order, on every rank."""
    if group.size == 1:
        return [flat]
    gathered = flat.new_empty(group.size * flat.numel())
    dist.all_gather_into_tensor(gathered, flat, group=group.of_torch)
    return list(gathered.chunk(group.size))
