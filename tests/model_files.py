"""A model folder, a drafter's folder and prompts as bytes on disk, made without torch: what is
checked before it is imported.

Weights are zeros but for what a test sets. Sizes are those of a llama with 2 layers and a
vocabulary of 32.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt_megatron.config.model_shape import load_model_config, tensor_shapes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
DRAFTER: dict[str, Any] = CONFIG | {
    "architectures": ["LlamaForCausalLMEagle"],
    "num_hidden_layers": 1,
}
_WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "I32": 4}

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


def zeros(shape: tuple[int, ...], dtype: str = "F32") -> Tensor:
    """A tensor of zeros."""
    return dtype, shape, bytes(_WIDTHS[dtype] * math.prod(shape))


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """The file as the safetensors library writes it."""
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + len(data))}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(data for _, _, data in tensors.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_model(folder: Path, **config: Any) -> dict[str, Tensor]:
    """config.json (CONFIG with `config` over it; None drops a key), zero weights, a tokenizer;
    gives the tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: v for name, v in (CONFIG | config).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    write_tokenizer(folder, settings["vocab_size"])
    try:
        shapes = tensor_shapes(load_model_config(folder))
    except ValueError:  # a config to be refused: its weights are never reached
        shapes = {}
    tensors = {name: zeros(shape) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    """A tokenizer.json with so many tokens; it is counted, not used."""
    vocab = {f"t{token_id}": token_id for token_id in range(num_tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


def write_drafter(folder: Path, **config: Any) -> dict[str, Tensor]:
    """A drafter's config.json (DRAFTER with `config` over it) and one tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: v for name, v in (DRAFTER | config).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {"fc.weight": zeros((16, 32))}
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors
