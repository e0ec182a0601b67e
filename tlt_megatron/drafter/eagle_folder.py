"""Drafters on disk: EAGLE / EAGLE-3 folders as SGLang loads them, the optimizer in a subfolder.

The weights file holds exactly the drafter's own parameters; the target provides embedding and head.
A drafter loads only with its target. SGLang skips unknown tensor names; this module rejects them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.config.draft_folder import (
    ARCHITECTURES,
    AUX_LAYER_IDS,
    BORROWED,
    MTP,
    NORM_BEFORE_RESIDUAL,
    SIZES,
    own_name,
    read_draft_settings,
    warn_of_unknown_keys,
)
from tlt_megatron.config.model_shape import rope_config
from tlt_megatron.models.draft_model import DraftConfig, DraftModel, fingerprint_target
from tlt_megatron.models.hf_io import HfReader, read_tensors
from tlt_megatron.runtime.durable import save_tensors
from tlt_megatron.saved_files import errors_named

WEIGHTS_FILE = "model.safetensors"
# In a subfolder: SGLang reads every .safetensors file next to config.json as weights.
TRAINER_FILE = "training/state.safetensors"
_OWN_KEY = "tlt_megatron"  # our own entry of config.json
_ORIGINAL = "original_max_position_embeddings"
_ROPE_FIELDS = {  # names in RopeConfig and in config.json
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor"),
}


def config_of(model: DraftModel) -> DraftConfig:
    """Return the drafter's config with the fingerprint of its target as the target is now."""
    return dataclasses.replace(model.config, target=fingerprint_target(model.embedding_VD))


def save_drafter(
    path: Path, model: DraftModel, trainer_state: Mapping[str, Tensor] | None = None
) -> None:
    """Write a drafter that is in training or was just made. See `write_drafter`."""
    write_drafter(path, config_of(model), model.state_dict(), trainer_state)


def write_drafter(
    path: Path,
    config: DraftConfig,
    weights: Mapping[str, Tensor],
    trainer_state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config.json, the weights, and the trainer's state if given: all in their own precision.

    `trainer_state` is `DrafterTrainer.state_dict()`.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: _to_disk(tensor) for name, tensor in weights.items()}
    save_tensors(tensors, path / WEIGHTS_FILE, metadata={"format": "pt"})
    save_draft_config(path, config, next(iter(tensors.values())).dtype)
    if trainer_state is not None:
        file = path / TRAINER_FILE
        file.parent.mkdir(exist_ok=True)
        save_tensors({name: _to_disk(tensor) for name, tensor in trainer_state.items()}, file)


def save_draft_config(path: Path, config: DraftConfig, dtype: torch.dtype) -> None:
    """Write config.json for a drafter with weights in `dtype`."""
    text = json.dumps(draft_config_json(config, dtype), indent=2)
    (path / "config.json").write_text(text, encoding="utf-8")


def _to_disk(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def draft_config_json(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of config.json for a drafter with weights in `dtype`."""
    rope = config.rope
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    parameters |= {name: getattr(rope, name) for name in _ROPE_FIELDS[rope.kind]}
    hf: dict[str, Any] = {
        "architectures": [ARCHITECTURES.get(config.architecture, MTP)],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # False for a tied target too: both embedding and head come from the target.
        "tie_word_embeddings": False,
        "rope_parameters": parameters,
        "dtype": str(dtype).removeprefix("torch."),
    }
    hf |= {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
    if config.is_eagle3:
        hf["draft_vocab_size"] = None  # the target's head predicts the whole vocabulary
        hf["eagle_config"] = {
            AUX_LAYER_IDS: list(config.aux_layer_ids),
            "use_aux_hidden_state": True,
        }
        if config.norm_before_residual:
            hf[NORM_BEFORE_RESIDUAL] = True
    target = None
    if config.target is not None:
        target = {name: getattr(config, name) for name in ("hidden_size", "vocab_size")}
        target["embedding_hash"] = config.target
    return hf | {_OWN_KEY: {"target": target}}


def load_draft_config(path: str | Path, num_layers: int | None = None) -> DraftConfig:
    """Read a drafter's config.json. ValueError says what is missing or not supported.

    `num_layers` of the target: see `read_draft_settings`.
    """
    hf = read_draft_settings(path, num_layers=num_layers)
    names = {theirs: ours for ours, theirs in ARCHITECTURES.items()}
    with errors_named(Path(path) / "config.json"):
        target = (hf.get(_OWN_KEY) or {}).get("target")
        fingerprint = target["embedding_hash"] if target else None
        int(fingerprint or "0", base=16)  # raises for what is no fingerprint
    return DraftConfig(
        architecture=names[hf["architectures"][0]],
        rope=rope_config(hf),
        aux_layer_ids=tuple(hf[AUX_LAYER_IDS]),
        norm_before_residual=hf[NORM_BEFORE_RESIDUAL],
        target=fingerprint,
        **{ours: hf[theirs] for ours, theirs in SIZES.items()},
    )


def load_drafter(
    path: str | Path,
    *,
    embedding_VD: Tensor,
    lm_head_VD: Tensor,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> DraftModel:
    """Load the drafter in the folder `path` for its target of `num_layers` layers.

    ValueError if it belongs to another target, or if its tensors are not the drafter's parameters.
    A copy of the target's own tensors is left out: `check_drafter` has compared it.
    """
    config = load_draft_config(path, num_layers)
    warn_of_unknown_keys(path)
    model = DraftModel(config, embedding_VD=embedding_VD, lm_head_VD=lm_head_VD, dtype=dtype)
    load_draft_weights(model, read_draft_weights(path, config), source=str(path))
    return model


def read_draft_weights(path: str | Path, config: DraftConfig) -> dict[str, Tensor]:
    """Return a drafter's own tensors by our names. EAGLE's fc without a bias gets one of zeros."""
    tensors = {own_name(name, config.is_eagle3): tensor for name, tensor in HfReader(path).items()}
    for name in BORROWED:
        tensors.pop(name, None)
    if not config.is_eagle3 and "fc.weight" in tensors:
        tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    return tensors


def load_draft_weights(model: DraftModel, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy tensors into the drafter. ValueError names an unknown, missing or misshapen one."""
    try:
        model.load_state_dict(dict(tensors))
    except RuntimeError as error:  # torch's message has several lines
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None


def load_trainer_state(path: str | Path) -> dict[str, Tensor] | None:
    """Return the state for `DrafterTrainer.load_state_dict`; None if the folder holds weights
    only.
    """
    file = Path(path) / TRAINER_FILE
    return read_tensors(file) if file.is_file() else None
