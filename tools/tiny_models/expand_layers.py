"""Makes a deeper policy with the same answers: it adds identity blocks after the policy's layers.

    python -m tools.tiny_models.expand_layers --model build/tiny_policy --extra 9 --out build/deep

A block whose attention and MLP outputs are zero adds nothing to the residual stream, so no token
changes until it is trained (block expansion, as in LLaMA Pro, Wu et al. 2024). Small policies from
scratch are shallow. With this, a pass costs as much as in a larger model, and the drafter's one
layer is small beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.durable import save_tensors

_ZEROED = ("o_proj.weight", "down_proj.weight")
_MODEL_FILES = ("model.safetensors.index.json", "config.json")


def with_identity_layers(
    tensors: Sequence[tuple[str, Tensor]], num_layers: int, num_extra: int
) -> list[tuple[str, Tensor]]:
    """Return the tensors of a model of `num_layers`, and `num_extra` copies of its last layer that
    add nothing.
    """
    source = f"model.layers.{num_layers - 1}."
    expanded = list(tensors)
    for index in range(num_layers, num_layers + num_extra):
        target = f"model.layers.{index}."
        expanded += [
            (name.replace(source, target), torch.zeros_like(t) if name.endswith(_ZEROED) else t)
            for name, t in tensors
            if name.startswith(source)
        ]
    return expanded


def expand_policy(model: Path, num_extra: int, out: Path) -> None:
    """Write the Hugging Face folder `out`: `model` with `num_extra` more layers."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tensors = with_identity_layers(
        list(HfReader(model).items()), config["num_hidden_layers"], num_extra
    )
    config["num_hidden_layers"] += num_extra
    if "layer_types" in config:
        config["layer_types"] += config["layer_types"][-1:] * num_extra
    if "max_window_layers" in config:
        config["max_window_layers"] = config["num_hidden_layers"]
    out.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors" and path.name not in _MODEL_FILES and path.is_file():
            shutil.copy(path, out / path.name)
    copies = {name: tensor.clone() for name, tensor in tensors}
    save_tensors(copies, out / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default="build/tiny_policy")
    parser.add_argument("--extra", type=int, default=20, help="layers put behind the policy's own")
    parser.add_argument("--out", default="build/deep_policy")
    options = parser.parse_args()
    if options.extra < 1:
        parser.error(f"--extra {options.extra}: must be >= 1")
    expand_policy(Path(options.model), options.extra, Path(options.out))


if __name__ == "__main__":
    main()
