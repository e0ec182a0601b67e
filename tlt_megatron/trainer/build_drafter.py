"""Builds speculation and the drafter's training from the settings. Called by build.py."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_megatron.config.draft_folder import default_aux_layer_ids
from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.eagle_folder import load_draft_config, load_drafter, load_trainer_state
from tlt_megatron.engines.base import RolloutEngine
from tlt_megatron.models.config import ModelConfig, load_model_config
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.own_drafter import load_own_drafter
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.spot.holdout import Holdout
from tlt_megatron.spot.lifecycle import DrafterLifecycle
from tlt_megatron.spot.rank_state import ReplicaLayout, SpotRanks
from tlt_megatron.trainer.run_site import Site
from tlt_megatron.types import SamplingParams


def drafter_tap_layers(config: RunConfig, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose states an EAGLE-3 drafter reads; () for other drafters."""
    if not config.speculation.enabled or not config.speculation.is_learned:
        return ()
    if config.speculation.drafter == OWN:
        return ()
    if config.speculation.drafter:
        return load_draft_config(config.speculation.drafter, target.num_layers).aux_layer_ids
    if config.drafter.algorithm != "eagle3":
        return ()
    return default_aux_layer_ids(target.num_layers)


def build_drafter(
    site: Site, engine: RolloutEngine, timeline: Timeline, sampling: SamplingParams
) -> DrafterLifecycle | None:
    """Return the drafter's training, or None without spot training. A collective of all ranks.

    `sampling` is that of the rollouts. The engine must hold the policy, because drafter and policy
    are compared. ValueError for a drafter of another policy.
    """
    config, world = site.config, site.world
    if not config.spot.enabled:
        return None
    target = load_model_config(config.model.path)
    embedding_VD, lm_head_VD = engine.target_tensors()
    # A second copy for training: the engine gets only weights that the publisher accepts.
    trainer = DrafterTrainer(make_drafter(config, target, embedding_VD, lm_head_VD), config.drafter)
    if config.speculation.drafter not in ("", OWN):
        state = load_trainer_state(config.speculation.drafter)
        if state is not None:
            trainer.load_state_dict(state)
    ranks = SpotRanks(
        store=site.store.part("spot"),
        layout=ReplicaLayout(world.size, config.ranks_per_engine),
        rank=world.rank,
        phase_timeout_s=config.run.group_timeout_s,
        check_ranks=site.heartbeat.check,  # if it raises, idle ranks stop their work
    )
    lifecycle = DrafterLifecycle(
        trainer,
        DataBuffer(config.spot, getattr(torch, config.rollout.dtype)),
        engine,
        Holdout(engine, sampling, config.speculation.parsed_strategies),
        ranks=ranks,
        world=world,
        timeline=timeline,
        run_dir=site.run_dir,
    )
    site.stack.callback(lifecycle.close)
    return lifecycle


def make_drafter(
    config: RunConfig, target: ModelConfig, embedding_VD: Tensor, lm_head_VD: Tensor
) -> DraftModel:
    """Load the drafter at `speculation.drafter` or the policy's own layer, or make the same random
    one on every rank.
    """
    if config.speculation.drafter == OWN:
        return load_own_drafter(
            config.model.path, target, embedding_VD=embedding_VD, lm_head_VD=lm_head_VD
        )
    if config.speculation.drafter:
        return load_drafter(
            config.speculation.drafter,
            embedding_VD=embedding_VD,
            lm_head_VD=lm_head_VD,
            num_layers=target.num_layers,
        )
    architecture = "eagle3" if config.drafter.algorithm == "eagle3" else "eagle"
    draft_config = make_draft_config(target, architecture, embedding_VD)
    return DraftModel(
        draft_config, embedding_VD=embedding_VD, lm_head_VD=lm_head_VD, seed=config.run.seed
    )
