"""Tiny models in Megatron at any layout of forked ranks: how tests build them, and whether they
export their source.

Importing this imports megatron.core in the test process, so that forked ranks need not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tlt_megatron.config.schema import McoreSection, ParallelSection
from tlt_megatron.mcore import cpu
from tlt_megatron.mcore.export import iter_hf_weights
from tlt_megatron.mcore.initialize import initialize_model_parallel
from tlt_megatron.mcore.model import build_stage
from tlt_megatron.mcore.weight_map import load_hf_weights
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import ProcessGroups, group_of

cpu.install()
importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")

CPU = select_device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 0.9,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tied": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tied": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    # dense layers between, and the weights of a token's experts do not add up to 1
    "qwen3_moe_mixed": ("qwen3_moe", {"mlp_only_layers": [0, 3], "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {}),
    "llama_linear_rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama_llama3_rope": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384},
    ),
    "mistral": ("mistral", {}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
}
LAYOUTS = {
    "tp1": ParallelSection(),
    "tp2": ParallelSection(tensor=2),
    "pp2": ParallelSection(pipeline=2),
    "tp2_pp2": ParallelSection(tensor=2, pipeline=2),
    "tp2_ep2": ParallelSection(tensor=2, expert=2),
    "tp2_pp2_ep2": ParallelSection(tensor=2, pipeline=2, expert=2),
}


CASES = [  # dense models have no experts to share, and a mixture shares them if tensors are cut
    (layout, name)
    for layout, parallel in LAYOUTS.items()
    for name, (kind, _) in MODELS.items()
    if (
        parallel.expert == 1
        if not kind.endswith("_moe")
        else parallel.expert > 1 or parallel.tensor == 1
    )
]


def build_on_rank(
    path: Path, parallel: ParallelSection, groups: ProcessGroups, **section: Any
) -> tuple[Any, Any]:
    config = load_model_config(path)
    [model] = build_stage(
        config,
        parallel=parallel,
        section=McoreSection(**section),
        dtype=torch.float32,
        device=CPU,
    )
    load_hf_weights([model], config, HfReader(path), groups)
    return model, config


def on_layout(parallel: ParallelSection, function: Callable[[ProcessGroups], Any]) -> list[Any]:
    """`function` on every rank of the layout."""

    def rank() -> Any:
        return function(initialize_model_parallel(parallel, group_of(dist.group.WORLD), seed=1))

    return run_ranks(parallel.tensor * parallel.pipeline, rank)


def is_export_the_source(model: Any, config: Any, path: Path, groups: ProcessGroups) -> bool:
    source = load_file(path / "model.safetensors")
    exported = dict(iter_hf_weights([model], config, groups))
    same_bits = [torch.equal(exported[name], tensor) for name, tensor in source.items()]
    return exported.keys() == source.keys() and all(same_bits)
