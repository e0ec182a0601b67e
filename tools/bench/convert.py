"""Memory and time of `tlt convert` with models of 2 GB, from every layout.

    python -m tools.bench convert

A dense model and a mixture of experts, of random bfloat16 weights in files of 0.5 GB, become
torch_dist checkpoints: by `tlt convert`, and by ranks of Megatron at each layout. `tlt convert`
makes Hugging Face folders of all of them, which are compared with the model bit for bit. Memory is
that of the process itself, without mapped files. At most it may be the largest layer, one file of
the Hugging Face folder and 0.5 GB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.config.schema import McoreSection, ParallelSection
from tlt_megatron.mcore.initialize import initialize_model_parallel
from tlt_megatron.mcore.megatron_checkpoint import write_state
from tlt_megatron.mcore.model import build_stage
from tlt_megatron.mcore.weight_map import load_hf_weights
from tlt_megatron.models.config import ModelConfig, load_model_config
from tlt_megatron.models.hf_io import HfReader, save_hf_model
from tlt_megatron.models.sizes import ModelSizes
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import init_world
from tools.bench.measure import print_table
from tools.commands.verify_conversion import tensor_differences
from tools.gpu.shapes import MODEL_CONFIGS

_LAYOUTS = {
    "dense": ("tp2", "pp2", "tp2 pp2", "cp2"),
    "mixture": ("pp2", "cp2", "ep2", "tp2 ep2", "pp2 ep2"),
}
_AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_FILE_BYTES = 1 << 29
_MORE_BYTES = 500_000_000  # than a layer and a file


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("--models", nargs="+", default=[*_LAYOUTS], choices=[*_LAYOUTS])
    add("--folder", default="build/bench/convert", help="takes 7 GB, removed afterwards")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Convert and print a table. Return the values of the JSON."""
    rows: list[dict[str, Any]] = []
    for name in options.models:
        folder = Path(options.folder) / name
        shutil.rmtree(folder, ignore_errors=True)
        hf, stored = folder / "hf", folder / "stored"
        config = _make_model(hf, MODEL_CONFIGS / f"2gb-{name}")
        found = {"hf": _convert(hf, stored, hf), "torch_dist": _back(folder)}
        for layout in _LAYOUTS[name]:
            sizes: dict[str, Any] = {_AXES[word[:2]]: int(word[2:]) for word in layout.split()}
            _save_sharded(hf, stored, ParallelSection(**sizes))
            found[layout] = _back(folder)
        for source, row in found.items():
            at_most = row.pop("file_gb") + (_layer_bytes(config) + _MORE_BYTES) / 1e9
            rows.append({"model": name, "from": source, **row, "at_most_gb": at_most})
        shutil.rmtree(folder)
    columns = ["model", "from", "peak_gb", "at_most_gb", "seconds", "tensors_that_differ"]
    cells = [[row.get(column) for column in columns] for row in rows]
    print_table("tlt convert", columns, cells, num_names=2)
    return {"rows": rows}


def _make_model(folder: Path, source: Path) -> ModelConfig:
    """Write random weights in the shapes of `source`."""
    config, generator = load_model_config(source), torch.Generator().manual_seed(0)
    shapes = tensor_shapes(config).items()
    tensors = ((name, torch.randn(shape, generator=generator)) for name, shape in shapes)
    save_hf_model(folder, tensors, source, dtype=torch.bfloat16, max_shard_bytes=_FILE_BYTES)
    return config


def _layer_bytes(config: ModelConfig) -> int:
    """Return the bytes of the largest layer or embedding in bfloat16."""
    sizes = ModelSizes(config)
    return 2 * max(sizes.layer, sizes.sparse_layer + sizes.experts, sizes.table)


def _back(folder: Path) -> dict[str, Any]:
    """Convert the checkpoint `stored` to a Hugging Face folder, compare it with `hf`, and remove
    both.
    """
    stored, back = folder / "stored", folder / "back"
    row = _convert(stored, back, back, "--model", str(folder / "hf"))
    tensors = HfReader(folder / "hf").items()
    differences = [*tensor_differences(tensors, back, torch.bfloat16, is_export=True)]
    shutil.rmtree(stored)
    shutil.rmtree(back)
    return row | {"tensors_that_differ": len(differences)}


def _convert(source: Path, target: Path, hf: Path, *options: str) -> dict[str, Any]:
    """Run `tlt convert`, watch its memory, and look for the largest file in the folder `hf`."""
    command = [sys.executable, "-m", "tlt_megatron.cli", "convert", "--dtype", "bfloat16"]
    started, peak = time.perf_counter(), 0
    process = psutil.Popen([*command, "--from", source, "--to", target, *options])
    while process.poll() is None:
        memory = process.memory_info()
        peak = max(peak, memory.rss - memory.shared)  # without what a file backs
        time.sleep(0.005)
    if process.returncode:
        raise RuntimeError(f"tlt convert ended with code {process.returncode}")
    seconds = time.perf_counter() - started
    largest = max(file.stat().st_size for file in hf.iterdir())
    return {"peak_gb": peak / 1e9, "file_gb": largest / 1e9, "seconds": seconds}


def _save_sharded(model: Path, target: Path, parallel: ParallelSection) -> None:
    """Let ranks of Megatron save the weights of `model`."""
    target.mkdir()
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=parallel.pipeline * max(parallel.tensor * parallel.context, parallel.expert),
        run_id="convert",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
    )
    elastic_launch(launch, _save_rank)(str(model), str(target), parallel)


def _save_rank(model: str, target: str, parallel: ParallelSection) -> None:
    groups = initialize_model_parallel(parallel, init_world("gloo", timeout_s=600.0), seed=0)
    config = load_model_config(model)
    [chunk] = build_stage(
        config,
        parallel=parallel,
        section=McoreSection(),
        dtype=torch.bfloat16,
        device=select_device("cpu"),
    )
    load_hf_weights([chunk], config, HfReader(Path(model)), groups)
    write_state(Path(target), {"model": chunk.sharded_state_dict()}, groups.world)
