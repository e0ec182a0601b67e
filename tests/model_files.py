"""A model folder and a drafter's folder with the files that are checked before torch is imported.

Sizes are those of a llama with 2 layers and a
vocabulary of 32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_megatron.config.draft_folder import draft_shapes, read_draft_settings
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


def write_model(folder: Path, **config: Any) -> dict[str, Tensor]:
    """Write config.json (CONFIG with `config` over it; None drops a key), weights of zeros and a
    tokenizer. Return the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: v for name, v in (CONFIG | config).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    write_tokenizer(folder, settings["vocab_size"])
    try:
        shapes = tensor_shapes(load_model_config(folder))
    except ValueError:  # a config to be refused: its weights are never reached
        shapes = {}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    """Write a tokenizer.json whose `num_tokens` tokens are counted and not used."""
    vocab = {f"t{token_id}": token_id for token_id in range(num_tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


def write_drafter(folder: Path, **config: Any) -> None:
    """Write a drafter's config.json (DRAFTER with `config` over it) and weights of zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: v for name, v in (DRAFTER | config).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    try:
        found = read_draft_settings(folder, num_layers=8, needs_whole_head=False)
        shapes = draft_shapes(found)
    except ValueError:  # a config to be refused: its weights are never reached
        shapes = {"fc.weight": (16, 32)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
