"""Checkpoints of policy, critic and reference in Megatron's torch_dist format: save at one tensor x
pipeline x data layout, load at another.

Called by trained_model.py. A folder holds `__<rank>_0.distcp` (tensors), `.metadata` (their index),
`common.pt` (plain values) and `metadata.json`. Writing is synchronous and in this process.
Megatron's own writer forks workers, which takes seconds and hangs if psutil is missing.

Loading never runs code from a checkpoint: see checkpoint_reader.py. The extra state of Transformer
Engine's layers (FP8 scales) is saved, as Megatron does. It is not loaded, because it is a pickle.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tlt_megatron.mcore.checkpoint_reader import COMMON_FILE, load_state, read_common, read_metadata
from tlt_megatron.mcore.lora import adapters_of, has_adapters
from tlt_megatron.mcore.optimizer import PolicyOptimizer
from tlt_megatron.mcore.optimizer_state import load_optimizer_state, sharded_optimizer_state
from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.durable import sync_path
from tlt_megatron.runtime.process_groups import Group, ProcessGroups
from tlt_megatron.saved_files import MALFORMED, amount, errors_named, one_line

_EXTRA = "_extra_state"  # how such keys of a state dict end

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class ShardWriter(FileSystemWriter):
    """Torch's synchronous writer: one file per rank, no worker processes."""

    def write_data(self, *args: Any) -> Future[list[WriteResult]]:
        try:
            return super().write_data(*args)
        except RuntimeError as error:  # torch's zip writer, as it closes after an error
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def save_checkpoint(
    path: Path, stage: Sequence[GPTModel], optimizer: PolicyOptimizer | None, groups: ProcessGroups
) -> None:
    """Write weights, optimizer and schedule to `path`, a new or empty folder that all ranks see.
    A frozen model has weights alone.

    A collective of all ranks. When it returns on any rank, all files are on disk (fsynced).
    RuntimeError if a weight is not finite, OSError if a rank cannot write.
    """
    _require_finite(stage, groups)
    write_state(path, _sharded_state(stage, optimizer, is_loading=False), groups.world)


def write_state(path: Path, state: dict[str, Any], world: Group) -> None:
    """Write Megatron sharded tensors and plain values to the empty folder `path`. A collective of
    the world.

    These are the steps of `dist_checkpointing.save`, whose plain values are in other places in
    other versions of Megatron.
    """
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    sharded, common = save_preprocess(state)
    try:
        _write_shards(path, sharded)
    except CheckpointException as error:
        raise OSError(first_failure(error)) from None
    if world.is_first:
        write_common(path, common)
    barrier(world)


def write_common(path: Path, common: dict[str, Any]) -> None:
    """Write the plain values and what says that the checkpoint is complete."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    data = io.BytesIO()
    torch.save(common, data)
    (path / COMMON_FILE).write_bytes(data.getvalue())
    save_config(CheckpointingConfig("torch_dist", 1), str(path))
    for name in (COMMON_FILE, "metadata.json", "."):
        sync_path(path / name)


def load_checkpoint(
    path: Path, stage: Sequence[GPTModel], optimizer: PolicyOptimizer | None
) -> None:
    """Restore what `save_checkpoint` wrote, at this or another layout. All
    ranks must call it.

    Settings (learning rate, weight decay, ...) stay those of this run; the position in the schedule
    is restored. ValueError if `path` holds no checkpoint, or more than plain values and tensors.
    ValueError also if the model's dtype or its shapes differ.
    """
    from megatron.core.dist_checkpointing import check_is_distributed_checkpoint

    with errors_named(path / "metadata.json", MALFORMED):
        is_complete = check_is_distributed_checkpoint(str(path))
    if not is_complete:
        raise ValueError(f"checkpoint path={str(path)!r}: holds no complete torch_dist checkpoint")
    common = read_common(path)
    read_metadata(path)  # refused here in one line; torch's loader would log a traceback of its own
    state = _sharded_state(stage, optimizer, is_loading=True)
    saved = common.get("identity")
    for name, value in state["identity"].items():
        found = saved.get(name) if isinstance(saved, dict) else None
        if found != value:
            raise ValueError(
                f"checkpoint {path} was written with {name}={one_line(repr(found))}: "
                f"must equal this run's {value!r}"
            )
    for chunk in state["model"].values():
        for name in [name for name in chunk if name.endswith(_EXTRA)]:
            del chunk[name]
    with errors_named(path, MALFORMED):
        _load_into(stage, optimizer, state, path)


def _load_into(
    stage: Sequence[GPTModel], optimizer: PolicyOptimizer | None, state: dict[str, Any], path: Path
) -> None:
    try:
        loaded = load_state(state, path)
    except CheckpointException as error:
        raise ValueError(f"checkpoint {path} is not loaded: {first_failure(error)}") from None
    if optimizer is not None:
        amount(loaded["lr_schedule"]["num_steps"])
    for number, chunk in enumerate(stage):
        extra = {n: value for n, value in chunk.state_dict().items() if n.endswith(_EXTRA)}
        frozen = chunk.state_dict() if has_adapters([chunk]) else {}
        chunk.load_state_dict(frozen | loaded["model"][number] | extra)
    if optimizer is None:
        return
    load_optimizer_state(optimizer.megatron, loaded["optimizer"])
    optimizer.scheduler.num_steps = 0  # its load adds the saved position to the current one
    optimizer.scheduler.load_state_dict(loaded["lr_schedule"])
    optimizer.zero_grad()


def _sharded_state(
    stage: Sequence[GPTModel], optimizer: PolicyOptimizer | None, *, is_loading: bool
) -> dict[str, Any]:
    """Return everything as Megatron sharded tensors: data to save, or a template to load into."""
    from megatron.core import parallel_state

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    chunks = enumerate(chunk.sharded_state_dict(metadata=metadata) for chunk in stage)
    model_state = dict(chunks)  # shards are stored under their own names, those of the whole model
    if has_adapters(stage):  # the frozen weights are in the folder model.path
        model_state = {i: adapters_of(state) for i, state in model_state.items()}
    dtype = str(next(stage[0].parameters()).dtype).removeprefix("torch.")
    # what must be equal when the checkpoint is loaded
    state: dict[str, Any] = {"model": model_state, "identity": {"model.dtype": dtype}}
    if optimizer is not None:
        state["optimizer"] = sharded_optimizer_state(
            optimizer.megatron, model_state, metadata, is_loading=is_loading
        )
        state["lr_schedule"] = optimizer.scheduler.state_dict()
    return state


def _require_finite(stage: Sequence[GPTModel], groups: ProcessGroups) -> None:
    """Raise RuntimeError on all ranks if a weight is not finite. No engine gets a critic's weights
    and checks them.
    """
    named = chain.from_iterable(chunk.named_parameters() for chunk in stage)
    own = next((name for name, p in named if not p.detach().isfinite().all()), None)
    for rank, name in enumerate(gather_objects(own, groups.world)):
        if name is not None:
            raise RuntimeError(
                f"rank {rank}: weights of {name} are not finite: not saved, earlier checkpoints stay"
            )


def first_failure(error: CheckpointException) -> str:
    """Return the first line of the first failed rank's error. The exception's own text holds the
    stack of every rank.
    """
    rank, (cause, _) = min(error.failures.items())
    lines = str(cause).splitlines()
    return f"rank {rank}: {one_line(lines[0]) if lines else type(cause).__name__}"


def _write_shards(path: Path, sharded: Any) -> None:
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist

    shards, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
        sharded, keep_only_main_replica=True
    )
    save(
        torch_dist.mcore_to_pyt_state_dict(shards),
        storage_writer=ShardWriter(path, sync_files=True),
        planner=torch_dist.MCoreSavePlanner(flatten_state_dict=False),
    )
