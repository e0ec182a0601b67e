"""Converts the policy between a Hugging Face folder and a Megatron torch_dist checkpoint.

It takes one process, on the CPU, and holds one parameter in memory, beside one file of 4 GB towards
Hugging Face.

    tlt convert --from runs/mine --to exported
    tlt convert --from Qwen/Qwen3-0.6B --to megatron

`--from` sets the direction. A folder with config.json and safetensors, or an id of the Hub, becomes
a torch_dist checkpoint of the weights alone. A run, its checkpoints, one of them or its `policy/`
becomes a Hugging Face model, for any layout that it was saved with. Config and tokenizer come from
`--model`; for a run, the default is the folder that it was started with.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")  # before torch
from collections.abc import Iterator

import torch
import yaml
from torch import Tensor

from tlt_megatron.config.hub import TOKENIZER, check_push, fetch_model, push_folder
from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.config.preflight import check_model
from tlt_megatron.mcore.checkpoint_reader import read_common
from tlt_megatron.mcore.stored_weights import iter_stored_weights, write_stored_weights
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader, save_hf_model
from tlt_megatron.runtime.durable import new_folder
from tlt_megatron.runtime.progress import Progress
from tools.saved_run import find_saved, run_of

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_COMMON_FILE = "common.pt"  # Megatron's plain values


def main() -> None:
    """Convert and print what was done. ValueError if that is impossible."""
    options = _parse()
    _give_tensors_their_own_pages()
    if options.push_to_hub:
        check_push(options.push_to_hub)
    source, target = fetch_model("--from", options.source), Path(options.to)
    if not source.is_dir():
        raise ValueError(f"--from {source}: no such folder")
    if options.push_to_hub and is_hf_folder(source):
        raise ValueError(
            "--push-to-hub: takes a Hugging Face folder; a torch_dist checkpoint is none"
        )
    if is_hf_folder(source):
        hf_to_megatron(source, target, dtype=options.dtype or "float32")
    else:
        name = options.model
        model = fetch_model("--model", name, TOKENIZER) if name else find_model(source)
        megatron_to_hf(find_policy(source), target, model, dtype=options.dtype)
    print(f"{source} -> {target}")
    if options.push_to_hub:
        print(push_folder(target, options.push_to_hub))


def _give_tensors_their_own_pages() -> None:
    """Let glibc give the memory of a freed tensor back, where else tensors that are kept would lie
    between holes.
    """
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(_MMAP_THRESHOLD, 1 << 17)


def is_hf_folder(path: Path) -> bool:
    """Return whether `path` is a Hugging Face model with weights."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def find_policy(path: Path) -> Path:
    """Return the torch_dist folder in `path`, as `find_saved`."""
    wanted = "a Hugging Face model, a run with a checkpoint, or a torch_dist checkpoint"
    return find_saved(path, "policy", (_COMMON_FILE,), wanted)


def find_model(path: Path) -> Path:
    """Return the model that the run in or around `path` was started with."""
    run = run_of(path)
    if run is None:
        raise ValueError(f"--model: needed, as {path} is in no run folder (with config.yaml)")
    return Path(yaml.safe_load((run / "config.yaml").read_text("utf-8"))["model"]["path"])


def hf_to_megatron(source: Path, target: Path, *, dtype: str = "float32") -> None:
    """Write the Hugging Face model in `source` as a torch_dist checkpoint to the new folder
    `target`.
    """
    if target.exists():
        raise ValueError(f"--to {target}: must not exist")
    config = check_model("--from", str(source))
    with new_folder(target) as temporary:
        temporary.mkdir(exist_ok=True)
        write_stored_weights(temporary, config, HfReader(source), dtype)


def megatron_to_hf(source: Path, target: Path, model: Path, *, dtype: str | None = None) -> None:
    """Write the policy of the torch_dist checkpoint `source` to `target`, a new folder, with the
    config and tokenizer of `model`.

    `dtype` defaults to that of its training.
    """
    if target.exists():
        raise ValueError(f"--to {target}: must not exist")
    kept = getattr(torch, dtype or read_common(source)["identity"]["model.dtype"])
    weights = iter_stored_weights(source, load_model_config(model))
    save_hf_model(target, _shown(weights, model), model, dtype=kept)


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="FOLDER")
    add("--to", required=True, metavar="FOLDER")
    add("--model", metavar="FOLDER", help="config and tokenizer, see above")
    by_default = "default: float32 for torch_dist, that of its training for Hugging Face"
    add("--dtype", choices=("float32", "bfloat16"), help=by_default)
    add("--push-to-hub", metavar="ID", help="upload the Hugging Face folder")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit("run it as: tlt convert")
