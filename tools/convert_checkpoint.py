"""Writes the policy of a run or a checkpoint as a Hugging Face folder.

It takes one process, on the CPU.

    tlt convert --from runs/mine --to exported

`--from` is a run, its checkpoints, one of them or its `policy/` (Megatron's torch_dist), for any
layout that it was saved with. Config and tokenizer come from `--model`; for a run, the default is
the folder that it was started with.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")  # before torch
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collections.abc import Iterator

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from tlt_megatron.cli import main as run_command
from tlt_megatron.config.hub import TOKENIZER, fetch_model
from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.config.schema import (
    McoreSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
)
from tlt_megatron.mcore.initialize import destroy_model_parallel, initialize_model_parallel
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import save_hf_model
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.process_groups import Group, init_world
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.trainer.manifest import is_checkpoint_root
from tlt_megatron.trainer.run_checkpoint import find_intact

_COMMON_FILE = "common.pt"  # Megatron's plain values
_TIMEOUT_S = 600.0


def main() -> None:
    """Convert and print what was done. ValueError if that is impossible."""
    options = _parse()
    source, target = Path(options.source), Path(options.to)
    if not source.is_dir():
        raise ValueError(f"--from {source}: no such folder")
    world = init_world("gloo", _TIMEOUT_S)
    try:
        policy, name = find_policy(source, world), options.model
        model = fetch_model("--model", name, TOKENIZER) if name else find_model(source)
        megatron_to_hf(policy, target, model, world, dtype=options.dtype)
    finally:
        dist.destroy_process_group()
    print(f"{source} -> {target}")


def find_policy(path: Path, world: Group) -> Path:
    """Return the torch_dist folder in `path`.

    `path` is a run, a folder of checkpoints (the newest intact one is used), one checkpoint, or the
    folder itself.
    """
    for root in (path, path / "checkpoints"):
        intact = find_intact(root, world) if is_checkpoint_root(root) else None
        if intact is not None:
            path = intact
            break
    for folder in (path, path / "policy"):
        if (folder / _COMMON_FILE).is_file():
            return folder
    raise ValueError(f"--from {path}: must be a run with a checkpoint, or a torch_dist checkpoint")


def find_model(path: Path) -> Path:
    """Return the model that the run in or around `path` was started with."""
    for folder in (path, *path.resolve().parents):
        if (folder / "config.yaml").is_file():
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            return Path(config["model"]["path"])
    raise ValueError(f"--model: needed, as {path} is in no run folder (with config.yaml)")


def megatron_to_hf(
    source: Path, target: Path, model: Path, world: Group, *, dtype: str | None = None
) -> None:
    """Write the policy of the torch_dist checkpoint `source` to `target`, a new folder, with the
    config and tokenizer of `model`.

    `dtype` defaults to that of its training.
    """
    if target.exists():
        raise ValueError(f"--to {target}: must not exist")
    common = torch.load(source / _COMMON_FILE, weights_only=True)
    identity = common["identity"]
    parallel = ParallelSection()
    policy = McorePolicyModel(
        model=ModelSection(path=str(model), dtype=identity["model.dtype"]),
        parallel=parallel,
        mcore=McoreSection(),
        optimizer=OptimizerSection(),
        groups=initialize_model_parallel(parallel, world, seed=0),
        device=select_device("cpu"),
        keep_reference=False,
    )
    try:
        policy.load(source)
        kept = getattr(torch, dtype or identity["model.dtype"])
        save_hf_model(target, _shown(policy.export_hf_weights(), model), model, dtype=kept)
    finally:
        destroy_model_parallel()


def _shown(tensors: Iterator[tuple[str, Tensor]], model: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `model`, and show how many are done."""
    num_tensors = len(tensor_shapes(load_model_config(model)))
    progress = Progress("auto", num_tensors, unit="tensor", enabled=True)
    for number, tensor in enumerate(tensors, 1):
        yield tensor
        if number % max(1, num_tensors // 20) == 0:
            progress.step(number, {})
    progress.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--from", dest="source", required=True, metavar="FOLDER")
    parser.add_argument("--to", required=True, metavar="FOLDER")
    parser.add_argument("--model", metavar="FOLDER", help="config and tokenizer, see above")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: that of its training"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_command(["convert", *sys.argv[1:]]))
