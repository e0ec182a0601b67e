"""Gives a tiny Llama policy an MTP layer of its own, as MiMo has one, trained on the policy's
responses.

    python -m tools.tiny_models.add_mtp_layer --model build/tiny_policy --out build/mtp_policy

The policy stays the same: a MiMo is a Llama with biases of q, k and v, which are zero here. A
random layer is trained by `tlt train-drafter speculation.drafter=own`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from tlt_megatron.config.own_layer import own_names, own_shapes
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader, companions
from tlt_megatron.runtime.durable import save_tensors
from tools.commands import warmup_drafter


def add_mtp_layer(model: Path, out: Path) -> None:
    """Write the folder `out`: the Llama `model` as a MiMo with a random MTP layer."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    config["num_nextn_predict_layers"] = 1
    out.mkdir(parents=True)
    for path in companions(model):
        shutil.copy(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    policy = load_model_config(out)
    tensors = dict(HfReader(model).items())
    for layer in range(policy.num_layers):
        for part in "qkv":
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            tensors[f"{name}.bias"] = torch.zeros(len(tensors[f"{name}.weight"]))
    generator, names = torch.Generator().manual_seed(0), own_names(policy)
    tensors |= {names[n]: _random(n, s, generator) for n, s in own_shapes(policy).items()}
    save_tensors(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("norm.weight")))
    return torch.randn(shape, generator=generator) * shape[1] ** -0.5


def main(arguments: list[str] | None = None) -> None:
    """Make the folder, unless it is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", type=Path, default=Path("build/tiny_policy"))
    parser.add_argument("--out", type=Path, default=Path("build/mtp_policy"))
    parser.add_argument("--steps", type=int, default=200, help="of the layer's training")
    options = parser.parse_args(arguments)
    if options.out.exists():
        print(f"{options.out} is there already")
        return
    with tempfile.TemporaryDirectory() as folder:
        random = Path(folder) / "model"
        add_mtp_layer(options.model, random)
        words = [f"--model={random}", f"--out={options.out}", f"--steps={options.steps}"]
        warmup_drafter.main([*words, "speculation.drafter=own"])


if __name__ == "__main__":
    main()
