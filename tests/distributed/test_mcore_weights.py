"""Loading and exporting the Megatron policy's weights, which tensors are refused, and the groups of
a layout.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.mcore_policy import Layout, build_policy, exports_source
from tests.ranks import GROUP_TIMEOUT_S, run_ranks
from tlt_megatron.config.schema import ParallelSection
from tlt_megatron.mcore.initialize import destroy_model_parallel, initialize_model_parallel
from tlt_megatron.mcore.weight_map import load_hf_weights
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.process_groups import group_of

TP2, PP2 = Layout(world=2, tensor=2), Layout(world=2, pipeline=2)


def test_transformer_engines_fused_norm_names_load_and_export(model_path: Path) -> None:
    def rank() -> tuple[bool, bool]:
        policy, groups = build_policy(model_path, TP2)
        [model] = policy._stage
        loaded = []
        for layer in model.decoder.layers:  # move the norms to where Transformer Engine has them
            for norm, linear in (
                ("input_layernorm", layer.self_attention.linear_qkv),
                ("pre_mlp_layernorm", layer.mlp.linear_fc1),
            ):
                weight = getattr(layer, norm).weight
                delattr(layer, norm)
                loaded.append((weight.data.clone(), weight))
                linear.register_parameter("layer_norm_weight", weight)
                weight.data.zero_()
        load_hf_weights([model], policy._config, HfReader(model_path), groups)
        is_loaded = all(torch.equal(before, weight) for before, weight in loaded)
        return is_loaded, exports_source(policy, model_path)

    assert run_ranks(2, rank) == [(True, True)] * 2


def test_exported_tensors_are_copies(model_path: Path) -> None:
    def rank() -> bool:
        policy, _ = build_policy(model_path, Layout(world=1))
        for _, tensor in policy.export_hf_weights():
            tensor.zero_()
        return exports_source(policy, model_path)

    assert run_ranks(1, rank) == [True]


def test_users_transformer_fields_reach_the_model(tied_path: Path) -> None:
    """Uneven stages: three layers, then one; exporting follows them."""
    uneven = {"num_layers_in_first_pipeline_stage": 3}

    def rank() -> tuple[int, bool]:
        policy, _ = build_policy(tied_path, PP2, transformer=uneven)
        return len(policy._stage[0].decoder.layers), exports_source(policy, tied_path)

    assert run_ranks(2, rank) == [(3, True), (1, True)]


def test_groups_are_megatrons_layout_and_can_be_formed_again() -> None:
    def rank() -> list[tuple[Any, ...]]:
        world = group_of(dist.group.WORLD)
        first = initialize_model_parallel(ParallelSection(tensor=2, pipeline=2), world, seed=0)
        timeout = first.tp.handle._get_backend(torch.device("cpu")).options._timeout
        assert timeout == datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        destroy_model_parallel()
        second = initialize_model_parallel(ParallelSection(tensor=2), world, seed=0)
        return [(g.tp.global_ranks, g.pp.global_ranks, g.dp.global_ranks) for g in (first, second)]

    ranks = run_ranks(4, rank)
    assert [rank[0] for rank in ranks] == [
        ((0, 1), (0, 2), (0,)),
        ((0, 1), (1, 3), (1,)),
        ((2, 3), (0, 2), (2,)),
        ((2, 3), (1, 3), (3,)),
    ]
    assert ranks[3][1] == ((2, 3), (3,), (1, 3))
