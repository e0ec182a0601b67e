"""Converts the optimizer's state to a form that does not depend on the layout. Used by checkpoint.py.

Megatron's distributed optimizer keeps flat shards of flat buckets. Here they become tensors with the shapes of the model's
parameters ("fully_reshardable", keys `optimizer.state.<param|exp_avg|exp_avg_sq>.<parameter>`). Megatron writes the same form,
with two differences, each covered by a test:
- Megatron drops the padding between buckets, then cuts as if it were there. With tied embeddings over pipeline stages, this can
  shift the saved state. Here every bucket is gathered and cut by itself.
- torch's AdamW, the fallback without Transformer Engine, keeps a step per parameter. State is created before it is described,
  the step stays out of Megatron's copy loop, and no two parameters share a step tensor after a load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer

_STATE_KEYS = ("param", "exp_avg", "exp_avg_sq")  # param: the float32 master weight


def sharded_optimizer_state(
    optimizer: ChainedOptimizer,
    model_state: dict[str, Any],
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """Return the state as Megatron sharded tensors: data to save (on the first data-parallel rank), or a template to load into.

    A collective of the data-parallel group. `model_state` is the model's sharded_state_dict.
    """
    part = _only_part(optimizer)
    _materialize(part)
    if not part.config.use_distributed_optimizer:
        return part.sharded_state_dict(model_state, is_loading, metadata=metadata)
    assert _is_distributed(part)
    state = part.state_dict()  # parameter groups with their step; no tensors
    state["param_state_sharding_type"] = metadata["distrib_optim_sharding_type"]
    tensors = _sharded_tensors(part, model_state, is_loading=is_loading)
    if tensors:
        state["param_state"] = tensors
    return state


def load_optimizer_state(optimizer: ChainedOptimizer, loaded: dict[str, Any]) -> None:
    """Load tensors and step from `loaded`. Learning rate, betas, weight decay, ... stay as they are."""
    part = _only_part(optimizer)
    groups = part.optimizer.param_groups
    settings = [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in groups
    ]
    param_state = loaded.pop("param_state", None)
    part.load_state_dict(loaded)
    for group, kept in zip(part.optimizer.param_groups, settings, strict=True):
        group.update(kept)
    steps = {
        parameter: part.optimizer.state[parameter].pop("step", None)
        for parameter in _parameters(part)
    }
    if param_state is not None:
        assert _is_distributed(part)
        part.load_parameter_state_from_fully_reshardable(param_state)
    if _has_step_per_parameter(part):
        for parameter, step in steps.items():
            # Megatron does not save a step of zero, and shares one tensor among all parameters.
            step = torch.tensor(0.0) if step is None else torch.as_tensor(step)
            part.optimizer.state[parameter]["step"] = step.clone()


def _only_part(optimizer: ChainedOptimizer) -> MegatronOptimizer:
    (part,) = optimizer.chained_optimizers  # a second one exists only for mixtures of experts
    return part


def _is_distributed(part: MegatronOptimizer) -> TypeGuard[DistributedOptimizer]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(part, DistributedOptimizer)


def _parameters(part: MegatronOptimizer) -> Iterator[Tensor]:
    for group in part.optimizer.param_groups:
        yield from group["params"]


def _has_step_per_parameter(part: MegatronOptimizer) -> bool:
    return isinstance(part.optimizer, torch.optim.AdamW)


def _materialize(part: MegatronOptimizer) -> None:
    """Create the initial optimizer state of every parameter that has none yet."""
    part.init_state_fn(part.optimizer, part.config)
    if _has_step_per_parameter(part):
        for parameter in _parameters(part):
            part.optimizer.state[parameter].setdefault("step", torch.tensor(0.0))


def _sharded_tensors(
    part: DistributedOptimizer, model_state: dict[str, Any], *, is_loading: bool
) -> dict[int, dict[str, Any]]:
    """Return the three float32 tensors of each parameter, in the order in which Megatron's load counts parameters.

    When saving, the result is empty on all data-parallel ranks except the first.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    bases, _ = extract_sharded_tensors_and_factories(model_state)
    base_of = {base.data: base for base in nested_values(bases)}
    values = {} if is_loading else _gather_values(part)
    if not is_loading and part.data_parallel_group.rank() != 0:
        return {}
    parameters = [p for buffer in part.buffers for p in buffer.param_index_map]
    tensors: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        base = base_of[parameter]
        tensors[index] = {}
        for key in _STATE_KEYS:
            if is_loading:
                data = torch.empty(parameter.shape, dtype=torch.float32)
            else:
                data = values[parameter][key].view(parameter.shape)
            changes = {"key": f"optimizer.state.{key}.{base.key}", "data": data}
            if not isinstance(base, ShardedTensorFactory):
                changes["dtype"] = torch.float32
            tensors[index][key] = replace(base, **changes)
    return tensors


def _gather_values(part: DistributedOptimizer) -> dict[Tensor, dict[str, Tensor]]:
    """Gather flat float32 values of every parameter of this stage on the CPU of the first data-parallel rank."""
    group = part.data_parallel_group
    values: dict[Tensor, dict[str, Tensor]] = {}
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        (bucket_ranges,) = ranges.values()
        for bucket_index, (start, end) in enumerate(buffer.bucket_indices):
            shard_ranges = bucket_ranges[bucket_index]["param_map"]
            for key in _STATE_KEYS:
                shard = torch.zeros(
                    (end - start) // group.size()
                )  # over gloo, so that no GPU has to hold a whole stage
                for parameter, spans in shard_ranges.items():
                    state = part._get_main_param_and_optimizer_states(parameter)
                    local = spans["gbuf_local"]
                    shard[local.start : local.end] = state[key].detach()
                bucket = _gather_first(shard, group)
                for parameter, (first, last, owner) in buffer.param_index_map.items():
                    if owner == bucket_index and bucket is not None:
                        values.setdefault(parameter, {})[key] = bucket[first - start : last - start]
    return values


def _gather_first(shard: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    """Concatenate the shards of all members (CPU tensors) on the first member; return None elsewhere."""
    if group.size() == 1:
        return shard
    is_first = group.rank() == 0
    shards = [torch.empty_like(shard) for _ in range(group.size())] if is_first else None
    dist.gather(shard, shards, dst=dist.get_process_group_ranks(group)[0], group=group)
    return torch.cat(shards) if shards is not None else None
