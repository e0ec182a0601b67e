"""Splits the world into Megatron's tensor-, context-, pipeline-, data- and expert-parallel groups
and returns them as values.

Megatron also keeps its groups as module state, which nothing outside `mcore` reads.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from tlt_megatron.config.schema import ParallelSection
from tlt_megatron.mcore import cpu
from tlt_megatron.runtime.process_groups import Group, ProcessGroups, group_of


def initialize_model_parallel(parallel: ParallelSection, world: Group, seed: int) -> ProcessGroups:
    """Form the groups and seed Megatron's random states. Every rank of the world must call it.

    The groups get the timeout of the world, which the layout divides.
    """
    cpu.install()
    # repeated per module and rank; nothing here needs Apex
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    from megatron.core import parallel_state, tensor_parallel

    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_size,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        # Annotated as int; becomes a timedelta.
        distributed_timeout_minutes=backend.options._timeout.total_seconds() / 60,  # pyright: ignore[reportArgumentType]
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ProcessGroups(
        world=world,
        tp=group_of(parallel_state.get_tensor_model_parallel_group()),
        cp=group_of(parallel_state.get_context_parallel_group()),
        pp=group_of(parallel_state.get_pipeline_model_parallel_group()),
        dp=group_of(parallel_state.get_data_parallel_group()),
        ep=group_of(parallel_state.get_expert_model_parallel_group()),
    )


def destroy_model_parallel() -> None:
    """Forget the groups so that others can be formed. They are freed with the world."""
    cpu.install()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
