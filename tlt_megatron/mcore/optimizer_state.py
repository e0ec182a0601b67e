"""Converts the optimizer's state to a form that does not depend on the layout. Used by
megatron_checkpoint.py.

Megatron's distributed optimizer keeps flat shards of flat buckets. Here they become tensors with
the shapes of the model's parameters ("fully_reshardable", keys
`optimizer.state.<param|exp_avg|exp_avg_sq>.<parameter>`). Megatron writes the same form, with three
differences, each covered by a test:
- Megatron gathers a stage on one rank. Here each parameter is saved by the rank whose shard holds
  its first element. Only parameters that shards cut are joined in host memory, so a rank needs
  little memory beside its own shard.
- Megatron drops the padding between buckets, then cuts as if it were there. With tied embeddings
  over pipeline stages, this can shift the saved state. Here every bucket is cut by itself.
- torch's AdamW, the fallback without Transformer Engine, keeps a step per parameter. State is
  created before it is described, the step stays out of Megatron's copy loop, and no two parameters
  share a step tensor after a load.
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
    model_state: dict[Any, Any],
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """Return this rank's part of the state as Megatron sharded tensors: data to save, or a template
    to load into.

    A collective of the data-parallel group. `model_state` has the sharded_state_dict of each chunk.
    The second optimizer of a mixture of experts, which has the experts, is in the result under
    "experts".
    """
    first, *others = optimizer.chained_optimizers
    state = _state_of_part(first, model_state, metadata, is_loading=is_loading)
    for part in others:
        state["experts"] = _state_of_part(part, model_state, metadata, is_loading=is_loading)
    return state


def _state_of_part(
    part: MegatronOptimizer,
    model_state: dict[Any, Any],
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[str, Any]:
    _materialize(part)
    assert _is_distributed(part)
    state = part.state_dict()  # parameter groups with their step; no tensors
    state["param_state_sharding_type"] = metadata["distrib_optim_sharding_type"]
    tensors = _sharded_tensors(part, model_state, is_loading=is_loading)
    if tensors:
        state["param_state"] = tensors
    return state


def load_optimizer_state(optimizer: ChainedOptimizer, loaded: dict[str, Any]) -> None:
    """Load tensors and step from `loaded`. Learning rate, betas, weight decay, ... stay as they
    are.

    All parameters have done equally many steps. So a mixture's checkpoint of one part loads into
    two, and the reverse.
    """
    saved = loaded["optimizer"]["param_groups"]
    step = next((group["step"] for group in saved if "step" in group), None)
    first, *others = optimizer.chained_optimizers
    for part in others:
        _load_part(part, loaded.get("experts", {}).get("param_state"), step)
    _load_part(first, loaded.get("param_state"), step)


def _load_part(
    part: MegatronOptimizer, param_state: dict[int, Any] | None, step: int | None
) -> None:
    assert _is_distributed(part)
    state = part.state_dict()
    for group in state["optimizer"]["param_groups"]:
        group.pop("step", None)  # Transformer Engine's Adam has none before its first update
        if step is not None:
            group["step"] = step
    part.load_state_dict(state)
    steps = {
        parameter: part.optimizer.state[parameter].pop("step", None)
        for parameter in _parameters(part)
    }
    if param_state is not None:
        part.load_parameter_state_from_fully_reshardable(param_state)
    if _has_step_per_parameter(part):
        for parameter, own in steps.items():
            # Megatron does not save a step of zero, and shares one tensor among all parameters.
            own = torch.tensor(0.0) if own is None else torch.as_tensor(own)
            part.optimizer.state[parameter]["step"] = own.clone()


def _is_distributed(part: MegatronOptimizer) -> TypeGuard[DistributedOptimizer]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(part, DistributedOptimizer)


def _parameters(part: MegatronOptimizer) -> Iterator[Tensor]:
    for group in part.optimizer.param_groups:
        yield from group["params"]


def _has_step_per_parameter(part: MegatronOptimizer) -> bool:
    return isinstance(part.optimizer, torch.optim.AdamW)


def steps_to_host(optimizer: ChainedOptimizer) -> None:
    """Move the steps of torch's AdamW to host memory, where it makes them. It reads back a step on
    a GPU for each parameter.
    """
    for part in optimizer.chained_optimizers:
        if _has_step_per_parameter(part):
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].cpu()


def _materialize(part: MegatronOptimizer) -> None:
    """Create the initial optimizer state of every parameter that has none yet."""
    part.init_state_fn(part.optimizer, part.config)
    if _has_step_per_parameter(part):
        for parameter in _parameters(part):
            part.optimizer.state[parameter].setdefault("step", torch.tensor(0.0))


def _sharded_tensors(
    part: DistributedOptimizer, model_state: dict[Any, Any], *, is_loading: bool
) -> dict[int, dict[str, Any]]:
    """Return three float32 tensors per parameter, under its number in the order of Megatron's load.

    When saving, a parameter is in the result of its owner, the rank whose shard holds its first
    element. When loading, it is in the results of all ranks whose shards hold a part of it.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    bases, _ = extract_sharded_tensors_and_factories(model_state)
    base_of = {base.data: base for base in nested_values(bases)}
    group = part.data_parallel_group
    tensors: dict[int, dict[str, Any]] = {}
    for index, (parameter, cuts) in enumerate(_cuts_of_parameters(part)):
        if group.rank() not in cuts:
            continue
        base, owner = base_of[parameter], min(cuts)
        assert isinstance(base.replica_id, tuple)  # the last is the data-parallel rank
        for key in _STATE_KEYS:
            if is_loading:
                data = torch.empty(parameter.shape, dtype=torch.float32)
            else:
                own = part._get_main_param_and_optimizer_states(parameter)[key].detach()
                data = _join_first(own, cuts, group)
            if data is None:
                continue
            changes = {
                "key": f"optimizer.state.{key}.{base.key}",
                "data": data.view(parameter.shape),
                "replica_id": (*base.replica_id[:-1], group.rank() - owner),
            }
            if not isinstance(base, ShardedTensorFactory):
                changes["dtype"] = torch.float32
            tensors.setdefault(index, {})[key] = replace(base, **changes)
    return tensors


def _cuts_of_parameters(part: DistributedOptimizer) -> Iterator[tuple[Tensor, dict[int, slice]]]:
    """Yield each parameter of this stage, and which of its elements each data-parallel rank
    holds.
    """
    num_ranks = part.data_parallel_group.size()
    for buffer in part.buffers:
        for parameter, (first, last, bucket) in buffer.param_index_map.items():
            start, end = buffer.bucket_indices[bucket]
            size = (end - start) // num_ranks
            cuts = {}
            for rank in range((first - start) // size, (last - 1 - start) // size + 1):
                low = start + rank * size
                cuts[rank] = slice(max(first, low) - first, min(last, low + size) - first)
            yield parameter, cuts


def _join_first(own: Tensor, cuts: dict[int, slice], group: dist.ProcessGroup) -> Tensor | None:
    """Join the pieces that the ranks `cuts` hold, on the first of them; return None on the others.

    A piece that is whole is returned as it is. Others go over gloo, so that no GPU needs room. All
    ranks of `cuts` call it in the order of the buffer: each rank first sends what begins before its
    shard.
    """
    if len(cuts) == 1:
        return own
    members = dist.get_process_group_ranks(group)
    owner, *others = cuts
    own = own.cpu()
    if group.rank() != owner:
        dist.send(own, members[owner], group=group)
        return None
    whole = torch.empty(max(cut.stop for cut in cuts.values()))
    whole[cuts[owner]] = own
    for rank in others:
        dist.recv(whole[cuts[rank]], members[rank], group=group)
    return whole
