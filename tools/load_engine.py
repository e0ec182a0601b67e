"""An embedded engine over a Hugging Face folder, for the tools that measure or use one outside a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import CHECKSUM_MODULUS, HfReader, checksum_tensor
from tlt_megatron.runtime.device import select_device

VERSION = 0  # of the weights that are loaded
MAX_PROMPT_TOKENS = 256


def load_engine(
    model: str | Path, *, dtype: str, num_identity_layers: int = 0, **settings: int
) -> EmbeddedEngine:
    """CPU engine with the weights of `model` loaded as VERSION; `settings` go to RolloutSection.

    `num_identity_layers` are put behind the policy's own: copies of its last layer whose attention and MLP outputs are zero,
    so they change no token and cost what a layer costs.
    """
    config = load_model_config(model)
    tensors = [(name, tensor.to(getattr(torch, dtype))) for name, tensor in HfReader(model).items()]
    for extra in range(num_identity_layers):
        last, new = config.num_layers - 1, config.num_layers + extra
        tensors += _identity_layer(tensors, f"model.layers.{last}.", f"model.layers.{new}.")
    engine = EmbeddedEngine(
        dataclasses.replace(config, num_layers=config.num_layers + num_identity_layers),
        RolloutSection(dtype=dtype, **settings),
        select_device("cpu"),
        max_prompt_tokens=MAX_PROMPT_TOKENS,
    )
    total = sum(checksum_tensor(name, tensor) for name, tensor in tensors) % CHECKSUM_MODULUS
    engine.load_weights(tensors, version=VERSION, checksum=lambda: total)
    return engine


def _identity_layer(
    tensors: Iterable[tuple[str, Tensor]], source: str, target: str
) -> list[tuple[str, Tensor]]:
    layer = []
    for name, tensor in tensors:
        if name.startswith(source):
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            copy = torch.zeros_like(tensor) if is_output else tensor
            layer.append((name.replace(source, target), copy))
    return layer
