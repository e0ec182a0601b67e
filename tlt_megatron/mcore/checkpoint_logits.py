"""The logits of the policy in a torch_dist checkpoint, for `tlt convert --verify`.

Megatron itself loads the weights, as a resume does, so a wrong name or layout of stored_weights.py
shows.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tlt_megatron.config.schema import McoreSection, ParallelSection
from tlt_megatron.mcore.checkpoint_reader import load_state
from tlt_megatron.mcore.initialize import destroy_model_parallel, initialize_model_parallel
from tlt_megatron.mcore.model import build_stage
from tlt_megatron.mcore.schedule import packing_of
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import init_world


def checkpoint_logits(
    path: Path, config: ModelConfig, token_ids_P: Tensor, rounded_to: torch.dtype
) -> Tensor:
    """Return the logits [P, V] of one sequence in float32 on the CPU, of weights rounded to
    `rounded_to`.

    The process must be in no group of ranks, and see no GPU. It forms a group of one rank.
    """
    parallel = ParallelSection()
    world = init_world("gloo", timeout_s=60.0)
    try:
        initialize_model_parallel(parallel, world, seed=0)
        [model] = build_stage(
            config,
            parallel=parallel,
            section=McoreSection(),
            dtype=torch.float32,
            device=select_device("cpu"),
        )
        model.eval()
        state = model.sharded_state_dict()
        wanted = {name: part for name, part in state.items() if not name.endswith("_extra_state")}
        model.load_state_dict(load_state({"model": wanted}, path)["model"], strict=False)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(rounded_to).float()
        num_tokens = token_ids_P.numel()
        packing = packing_of(torch.tensor([0, num_tokens], dtype=torch.int32), token_ids_P.device)
        inputs = token_ids_P[None], torch.arange(num_tokens)[None], None
        with torch.no_grad():
            return model(*inputs, packed_seq_params=packing)[0]
    finally:
        destroy_model_parallel()
        dist.destroy_process_group()
