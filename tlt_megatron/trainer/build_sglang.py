"""Builds the SGLang engine of a run. build.py loads it if `rollout.engine` is sglang."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from tlt_megatron.config.draft_folder import is_of_sglang
from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.schema import RunConfig, SpeculationSection
from tlt_megatron.drafter.eagle_folder import save_drafter
from tlt_megatron.engines.sglang.connection import check_version
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.process_groups import SINGLE, Group, group_of
from tlt_megatron.trainer.build_drafter import make_drafter

_START_FOLDER = "drafter_start"
_Made = TypeVar("_Made")


def build_sglang_engine(
    config: RunConfig, device: Device, run_dir: Path, world: Group
) -> SglangEngine:
    """Start an engine on the first of every `tp_size` ranks; the others follow it.

    A collective of all ranks: afterwards all have an engine, or all raise.
    """
    _together(check_version, world)
    speculation = _with_drafter(config, run_dir, world)
    replica = _replica_group(config)

    def start() -> SglangEngine:
        return SglangEngine(
            config.model.path,
            config.rollout,
            config.sglang,
            device,
            rank=world.rank,
            max_prompt_tokens=config.longest_context,
            speculation=speculation,
            replica=replica,
        )

    return _together(start, world)


def _replica_group(config: RunConfig) -> Group:
    """Return the ranks whose GPUs this rank's engine uses. A collective of all ranks."""
    if config.ranks_per_engine == 1:
        return SINGLE
    timeout = datetime.timedelta(seconds=config.run.group_timeout_s)
    own, _ = dist.new_subgroups(config.ranks_per_engine, timeout=timeout, backend="gloo")
    return group_of(own)


def _with_drafter(config: RunConfig, run_dir: Path, world: Group) -> SpeculationSection:
    """Return the settings with a drafter folder. Rank 0 writes a random one if none is set, and
    one in SGLang's form if the drafter has another.
    """
    speculation = config.speculation
    if not (speculation.enabled and speculation.is_learned):
        return speculation
    if speculation.drafter == OWN:
        return speculation
    if speculation.drafter and is_of_sglang(speculation.drafter):
        return speculation
    folder = run_dir / _START_FOLDER
    if world.is_first:
        reader = HfReader(config.model.path)
        embedding = reader["model.embed_tokens.weight"]
        is_tied = "lm_head.weight" not in reader
        head = embedding if is_tied else reader["lm_head.weight"]
        save_drafter(
            folder, make_drafter(config, load_model_config(config.model.path), embedding, head)
        )
    barrier(world)
    return dataclasses.replace(speculation, drafter=str(folder))


def _together(make: Callable[[], _Made], world: Group) -> _Made:
    """Return the result of `make` on each rank. If it fails on any rank, all ranks raise one
    error.
    """
    made: _Made | None = None
    error: Exception | None = None
    try:
        made = make()
    except (RuntimeError, ValueError) as caught:
        error = caught
    own = None if error is None else (isinstance(error, ValueError), str(error))
    failed = {rank: each for rank, each in enumerate(gather_objects(own, world)) if each}
    if not failed:
        return cast(_Made, made)
    if isinstance(made, SglangEngine):
        made.close()
    first, (is_refusal, reason) = next(iter(failed.items()))
    kind = ValueError if is_refusal else RuntimeError
    raise kind(f"rollout engines of ranks {list(failed)} failed; rank {first}: {reason}") from error
