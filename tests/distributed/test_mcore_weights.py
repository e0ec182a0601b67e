"""Loading and exporting the Megatron policy's weights, which tensors are refused, and the groups of
a layout.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.mcore_models import LAYOUTS, MODELS, build_on_rank, is_export_the_source, on_layout
from tests.ranks import GROUP_TIMEOUT_S, run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.schema import ParallelSection
from tlt_megatron.mcore.export import iter_hf_weights
from tlt_megatron.mcore.initialize import destroy_model_parallel, initialize_model_parallel
from tlt_megatron.mcore.weight_map import load_hf_weights
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.process_groups import ProcessGroups, group_of


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the models, by name."""
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, config) in MODELS.items():
        make_tiny_hf(folder / name, kind, **config)
    return {name: folder / name for name in MODELS}


def test_transformer_engines_fused_norm_names_load_and_export(
    paths: dict[str, Path],
) -> None:
    path = paths["qwen3"]

    def rank(groups: ProcessGroups) -> tuple[bool, bool]:
        model, config = build_on_rank(path, LAYOUTS["tp2"], groups)
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
        load_hf_weights([model], config, HfReader(path), groups)
        is_loaded = all(torch.equal(before, weight) for before, weight in loaded)
        return is_loaded, is_export_the_source(model, config, path, groups)

    assert on_layout(LAYOUTS["tp2"], rank) == [(True, True)] * 2


def test_exported_tensors_are_copies(paths: dict[str, Path]) -> None:
    path = paths["llama"]

    def rank(groups: ProcessGroups) -> bool:
        model, config = build_on_rank(path, LAYOUTS["tp1"], groups)
        for _, tensor in iter_hf_weights([model], config, groups):
            tensor.zero_()
        return is_export_the_source(model, config, path, groups)

    assert on_layout(LAYOUTS["tp1"], rank) == [True]


def _edit(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("is_equal", [True, False])
def test_tied_embeddings_with_another_head_in_the_files_are_refused_on_every_rank(
    tmp_path: Path, is_equal: bool
) -> None:
    """The ends of the head are those of the embedding, so that the comparison before launch cannot
    see it.
    """
    source = make_tiny_hf(tmp_path / "source", "qwen2", tied=True, num_layers=2)

    def change(tensors: dict[str, Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[256, 3] += 0.0 if is_equal else 1.0
        tensors["lm_head.weight"] = head

    path = _edit(source, tmp_path / "edited", change)

    def rank(groups: ProcessGroups) -> str:
        try:
            build_on_rank(path, LAYOUTS["pp2"], groups)
        except ValueError as error:
            return str(error)
        return ""

    first, second = on_layout(LAYOUTS["pp2"], rank)
    assert first == second
    assert bool(first) != is_equal
    assert is_equal or "tie_word_embeddings=true, but lm_head.weight is not model.embed" in first


def test_users_transformer_fields_reach_the_model(
    paths: dict[str, Path],
) -> None:
    """Uneven stages: three layers, then one; exporting follows them."""
    path = paths["llama_tied"]
    uneven = {"num_layers_in_first_pipeline_stage": 3}

    def rank(groups: ProcessGroups) -> tuple[int, bool]:
        model, config = build_on_rank(path, LAYOUTS["pp2"], groups, transformer=uneven)
        is_same = is_export_the_source(model, config, path, groups)
        return len(model.decoder.layers), is_same

    assert on_layout(LAYOUTS["pp2"], rank) == [(3, True), (1, True)]


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
