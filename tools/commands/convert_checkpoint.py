"""Converts the policy between a Hugging Face folder and a Megatron torch_dist checkpoint.

It takes one process, on the CPU. It holds one parameter in memory, and towards Hugging Face also
one file of 4 GB.

    tlt convert --from runs/mine --to exported
    tlt convert --from Qwen/Qwen3-0.6B --to megatron

`--from` sets the direction. A folder with config.json and safetensors, or an id of the Hub, becomes
a torch_dist checkpoint of the weights alone. A run, its checkpoints, one of them or its `policy/`
becomes a Hugging Face model, for any layout that it was saved with. Config and tokenizer come from
`--model`; for a run, the default is the folder that it was started with. `--verify` compares what
was written with what was read; where `--to` is there already, it only compares.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")  # before torch
from collections.abc import Iterator

import torch
from torch import Tensor

from tlt_megatron.config.hub import TOKENIZER, check_push, fetch_model, push_folder
from tlt_megatron.config.load import check_record, read_sections
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.model_shape import tensor_shapes
from tlt_megatron.config.own_layer import copied_parts, own_names, stored_layers
from tlt_megatron.config.schema import DataSection
from tlt_megatron.config.weight_files import name_some
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.mcore.checkpoint_reader import read_common
from tlt_megatron.mcore.stored_weights import iter_stored_weights, write_stored_weights
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader, save_hf_model, with_own_layer
from tlt_megatron.models.own_drafter import read_own_layer, save_own_layer
from tlt_megatron.runtime.device import host_available_bytes
from tlt_megatron.runtime.durable import new_folder
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.saved_files import one_line
from tools.commands.saved_run import find_saved, run_of
from tools.commands.verify_conversion import (
    MOST_DIFFERENCE,
    NUM_TOKENS,
    companion_differences,
    logits_bytes,
    logits_difference,
    tensor_differences,
)

DTYPES = ("float32", "bfloat16")
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_INDEX_FILE = ".metadata"  # every torch_dist folder has it


def main() -> int:
    """Convert and print what was done. Return 1 if `--verify` finds a difference. ValueError if
    there is nothing to convert.
    """
    options = _parse()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron would use the GPUs that torch sees
    _give_tensors_their_own_pages()
    if options.push_to_hub:
        check_push(options.push_to_hub)
    source, target = fetch_model("--from", options.source), Path(options.to)
    if not source.is_dir():
        raise ValueError(f"--from {source}: no such folder")
    is_hf = is_hf_folder(source)
    if options.push_to_hub and is_hf:
        raise ValueError(
            "--push-to-hub: takes a Hugging Face folder; a torch_dist checkpoint is none"
        )
    is_converted = options.verify and target.exists()
    if is_hf:
        check_model("--from", source, needs_tokenizer=False)
        policy, folder, model = target, source, None
        dtype = options.dtype or (trained_dtype(target) if is_converted else "float32")
    else:
        name = options.model
        model = fetch_model("--model", name, TOKENIZER) if name else find_model(source)
        check_model("--model", model, needs_weights=False, needs_tokenizer=False)
        policy, folder = find_policy(source), target
        dtype = options.dtype or trained_dtype(policy)
    if not is_converted:
        if model is None:
            hf_to_megatron(folder, policy, dtype=dtype)
        else:
            megatron_to_hf(policy, folder, model, dtype=dtype)
        print(f"{source} -> {target}")
    if options.verify and not verify(policy, folder, dtype, model=model):
        return 1
    if options.push_to_hub:
        print(push_folder(target, options.push_to_hub))
    return 0


def _give_tensors_their_own_pages() -> None:
    """Let glibc give back the memory of each freed tensor. Else it would stay as holes between the
    tensors that are kept.
    """
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(_MMAP_THRESHOLD, 1 << 17)


def is_hf_folder(path: Path) -> bool:
    """Return whether `path` is a Hugging Face model with weights."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def find_policy(path: Path) -> Path:
    """Return the torch_dist folder in `path`, as `find_saved`."""
    wanted = "a Hugging Face model, a run with a checkpoint, or a torch_dist checkpoint"
    return find_saved(path, "policy", (_INDEX_FILE,), wanted)


def find_model(path: Path) -> Path:
    """Return the model that the run in or around `path` was started with."""
    run = run_of(path)
    if run is None:
        raise ValueError(f"--model: needed, as {path} is in no run folder (with config.yaml)")
    section = read_sections(run / "config.yaml").get("model")
    model = section.get("path") if isinstance(section, dict) else None
    if not model or not isinstance(model, str):
        raise ValueError(f"--model: needed, as {run}/config.yaml has no model.path")
    return Path(model)


def hf_to_megatron(source: Path, target: Path, *, dtype: str = "float32") -> None:
    """Write the Hugging Face model in `source` as a torch_dist checkpoint to the new folder
    `target`.
    """
    if target.exists():
        raise ValueError(f"--to {target}: must not exist")
    config = load_model_config(source)
    with new_folder(target) as temporary:
        temporary.mkdir(exist_ok=True)
        shown = _Shown(len(tensor_shapes(config)))
        write_stored_weights(temporary, config, HfReader(source), dtype, shown.add)
        save_own_layer(temporary, source, getattr(torch, dtype))
        shown.close()


def megatron_to_hf(source: Path, target: Path, model: Path, *, dtype: str | None = None) -> None:
    """Write the policy of the torch_dist checkpoint `source` to `target`, a new folder, with the
    config and tokenizer of `model`.

    `dtype` defaults to that of its training. The chat template has the run's arguments.
    """
    if target.exists():
        raise ValueError(f"--to {target}: must not exist")
    _check_own_layer(source, model)
    kept = getattr(torch, dtype or trained_dtype(source))
    data = data_of(source)
    save_hf_model(target, _read_shown(source, model), model, dtype=kept)
    if data is not None:
        load_tokenizer(model, data.template_date).pin_template(target, data.chat_template_kwargs)


def data_of(policy: Path) -> DataSection | None:
    """Return how the run that saved a policy read its prompts; None if it is in no run folder."""
    run = run_of(policy)
    section = read_sections(run / "config.yaml").get("data") if run else None
    if not isinstance(section, dict):
        return None
    named = {
        key: section[key] for key in ("chat_template_kwargs", "template_date") if key in section
    }
    return check_record(DataSection, named, f"{run}/config.yaml: data")


def _check_own_layer(source: Path, model: Path) -> None:
    """Raise ValueError if the layer for MTP would lack tensors: a Hub id brings no weights."""
    config = load_model_config(model)
    found = {name for name, _ in read_own_layer(source, config)}
    missing = {*own_names(config).values()} - found if found else set()
    if missing and not any(model.glob("*.safetensors")):
        raise ValueError(
            f"--model {model}: must be a folder with weights: {name_some(sorted(missing))} of the MTP"
            f" layer are not in {source}"
        )


def trained_dtype(policy: Path) -> str:
    """Return the dtype of the model that wrote a torch_dist checkpoint. ValueError if another
    program wrote the checkpoint without one.
    """
    try:
        identity = read_common(policy)["identity"]
        found = identity.get("model.dtype") if isinstance(identity, dict) else None
        if found not in DTYPES:
            raise ValueError(
                f"model.dtype={one_line(repr(found), 40)}: must be {' or '.join(DTYPES)}"
            )
        return found
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"--dtype: needed, as {policy} does not say that of its training ({error})"
        ) from None


def verify(policy: Path, folder: Path, dtype: str, *, model: Path | None = None) -> bool:
    """Compare tensors and logits of a torch_dist checkpoint and a Hugging Face folder. Print what
    was compared and what differs, and return whether nothing does.

    `model` is the folder that gave `folder` its config and tokenizer. It is None if the checkpoint
    was written.
    """
    kept: torch.dtype = getattr(torch, dtype)
    config = load_model_config(model or folder)
    is_export = model is not None
    stored = _read_shown(policy, model or folder)
    if model is not None:
        stored = with_own_layer(stored, model)
    differences = [*tensor_differences(stored, folder, kept, is_export=is_export)]
    layers = {*stored_layers(config, HfReader(folder).names())}
    if not is_export:
        layers -= copied_parts(config, layers).keys()
        held = {name for name, _ in read_own_layer(policy, config)}
        differences += [f"{policy} has no tensor {name}" for name in sorted(layers - held)]
    compared = [f"{len(tensor_shapes(config)) + len(layers)} tensors, bit for bit"]
    if model is not None:
        differences += companion_differences(model, folder, data_of(policy))
        compared.append("tokenizer, chat template, generation config")
    needed, available = logits_bytes(config), host_available_bytes()
    if needed > available:
        print(
            f"logits not compared: {needed / 1e9:.1f} GB of memory needed, {available / 1e9:.1f} available"
        )
    elif not differences:
        share = logits_difference(policy, folder, kept)
        of_logits = f"logits of {NUM_TOKENS} tokens (at most {share:.1e} of the largest apart)"
        compared.append(of_logits)
        if not share <= MOST_DIFFERENCE:
            differences.append(f"transformers and Megatron differ: {of_logits}")
    for line in differences:
        print(f"--verify: {line}")
    if not differences:
        print(f"verified: {'; '.join(compared)}")
    return not differences


def _read_shown(policy: Path, model: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a torch_dist checkpoint of `model`, and show how many are done. Those of
    its layer for MTP come last.
    """
    config = load_model_config(model)
    shown = _Shown(len(tensor_shapes(config)))
    for tensor in iter_stored_weights(policy, config):
        yield tensor
        shown.add()
    shown.close()
    yield from read_own_layer(policy, config)


class _Shown:
    """How many tensors are done, with the time that is left."""

    def __init__(self, num_tensors: int) -> None:
        self._progress = Progress("auto", num_tensors, unit="tensor")
        self._num_done = 0
        self.close = self._progress.close

    def add(self) -> None:
        """Count one more."""
        self._num_done += 1
        num_steps = self._progress.num_steps
        if self._num_done % max(1, num_steps // 20) == 0 or self._num_done == num_steps:
            self._progress.step(self._num_done, {})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="FOLDER")
    add("--to", required=True, metavar="FOLDER")
    add("--model", metavar="FOLDER", help="config and tokenizer, see above")
    by_default = "default: float32 for torch_dist, that of its training for Hugging Face"
    add("--dtype", choices=DTYPES, help=by_default)
    add("--verify", action="store_true", help="compare every tensor, and the logits of a prompt")
    add("--push-to-hub", metavar="ID", help="upload the Hugging Face folder")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit("run it as: tlt convert")
