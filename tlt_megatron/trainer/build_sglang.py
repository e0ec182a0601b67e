"""The SGLang engine of a run, from the settings. Called by build.py; imported only where `rollout.engine` is sglang."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from tlt_megatron.config.schema import RunConfig, SpeculationSection
from tlt_megatron.drafter.checkpoint import save_drafter
from tlt_megatron.engines.sglang.engine import SglangEngine
from tlt_megatron.engines.sglang.follower import FollowerEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.process_groups import Group

_START_FOLDER = "drafter_start"
_Made = TypeVar("_Made")


def build_sglang_engine(
    config: RunConfig, device: Device, *, run_dir: Path, world: Group
) -> SglangEngine | FollowerEngine:
    """One engine for every `tp_size` neighbouring ranks, on the first of them. A collective of all ranks: all have an engine
    afterwards, or all raise."""
    speculation = _with_drafter(config, run_dir, world)
    replica_size = config.ranks_per_engine
    if world.size % replica_size:
        raise ValueError(
            f"sglang.engine_args: tp_size={replica_size} must divide the {world.size} ranks"
        )
    if world.rank % replica_size:
        return _together(lambda: _follow(config, speculation, device), world)
    return _together(
        lambda: SglangEngine(
            config.model.path,
            config.rollout,
            config.sglang,
            device,
            rank=world.rank,
            max_prompt_tokens=config.data.max_prompt_tokens,
            speculation=speculation,
        ),
        world,
    )


def _follow(config: RunConfig, speculation: SpeculationSection, device: Device) -> FollowerEngine:
    dtype: torch.dtype = getattr(torch, config.rollout.dtype)
    return FollowerEngine(device, dtype, has_drafter=speculation.enabled and speculation.is_learned)


def _with_drafter(config: RunConfig, run_dir: Path, world: Group) -> SpeculationSection:
    """SGLang starts from a folder: where the settings name none, that of a drafter with random weights."""
    speculation = config.speculation
    if speculation.drafter or not (speculation.enabled and speculation.is_learned):
        return speculation
    folder = run_dir / _START_FOLDER
    if world.is_first:
        _save_random_drafter(config, folder)
    barrier(world)
    return dataclasses.replace(speculation, drafter=str(folder))


def _save_random_drafter(config: RunConfig, folder: Path) -> None:
    """The same as `drafter.seed` gives every rank."""
    reader = HfReader(config.model.path)
    embedding = reader["model.embed_tokens.weight"]
    is_tied = "lm_head.weight" not in reader
    head = embedding if is_tied else reader["lm_head.weight"]
    architecture = "eagle3" if config.drafter.algorithm == "eagle3" else "eagle"
    draft_config = make_draft_config(
        load_model_config(config.model.path),
        architecture,
        embedding,
        tuple(config.drafter.aux_layer_ids),
    )
    model = DraftModel(
        draft_config, embedding_VD=embedding, lm_head_VD=head, seed=config.drafter.seed
    )
    save_drafter(folder, model)


def _together(make: Callable[[], _Made], world: Group) -> _Made:
    """What `make` gives on every rank; one error on all of them if it fails on any."""
    made, error = None, None
    try:
        made = make()
    except (RuntimeError, ValueError) as caught:
        error = caught
    reasons = gather_objects(None if error is None else str(error), world)
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if not failed:
        return made
    if made is not None:
        made.close()
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    first, reason = next(iter(failed.items()))
    raise kind(f"rollout engines of ranks {list(failed)} failed; rank {first}: {reason}") from error
