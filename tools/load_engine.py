"""Creates an embedded engine from a Hugging Face folder, for tools that use one outside a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import CHECKSUM_MODULUS, HfReader, checksum_tensor
from tlt_megatron.runtime.device import select_device
from tools.expand_layers import with_identity_layers

VERSION = 0  # of the weights that are loaded
MAX_PROMPT_TOKENS = 256


def load_engine(
    model: str | Path,
    *,
    dtype: str,
    num_identity_layers: int = 0,
    tap_layers: tuple[int, ...] = (),
    device: str = "cpu",
    **settings: int,
) -> EmbeddedEngine:
    """Return an engine with the weights of `model` loaded as VERSION. `settings` go to RolloutSection.

    `num_identity_layers` are added after the policy's own. They change no token and cost as much as a layer.
    """
    config = load_model_config(model)
    tensors = [(name, tensor.to(getattr(torch, dtype))) for name, tensor in HfReader(model).items()]
    tensors = with_identity_layers(tensors, config.num_layers, num_identity_layers)
    engine = EmbeddedEngine(
        dataclasses.replace(config, num_layers=config.num_layers + num_identity_layers),
        RolloutSection(dtype=dtype, **settings),
        select_device(device),
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        tap_layers=tap_layers,
    )
    total = sum(checksum_tensor(name, tensor) for name, tensor in tensors) % CHECKSUM_MODULUS
    engine.load_weights(tensors, version=VERSION, checksum=lambda: total)
    return engine
