"""The checkpoint's own layer (MTP) as a drafter: loaded from the policy's folder, and back under
the checkpoint's names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tlt_megatron.config.draft_folder import MTP, SIZES
from tlt_megatron.config.model_folder import EMBEDDING
from tlt_megatron.config.model_shape import (
    FAMILIES,
    ROUTER_BIAS,
    ModelConfig,
    load_model_config,
    tensor_shapes,
)
from tlt_megatron.config.own_layer import copied_parts, is_frozen, own_names, stored_layers
from tlt_megatron.config.weight_files import SINGLE_NAME
from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.draft_model import DraftConfig, DraftModel, FrozenExperts, LayerForm
from tlt_megatron.models.hf_io import HfReader, dtype_of, read_tensors, save_hf_model
from tlt_megatron.runtime.durable import save_tensors
from tlt_megatron.saved_files import read_json

BESIDE_POLICY = "own_layer.safetensors"  # in a torch_dist folder of `tlt convert`


def load_own_drafter(
    path: str | Path,
    policy: ModelConfig,
    *,
    embedding_VD: Tensor,
    lm_head_VD: Tensor,
    dtype: torch.dtype = torch.float32,
) -> DraftModel:
    """Load the layer of the checkpoint `path`, which `check_own_layer` has checked."""
    reader, names = HfReader(path), own_names(policy)
    experts = None
    if policy.experts is not None:
        experts = _read_experts(reader, policy, names, lm_head_VD)
    model = DraftModel(
        _draft_config(policy),
        embedding_VD=embedding_VD,
        lm_head_VD=lm_head_VD,
        dtype=dtype,
        experts=experts,
    )
    trained = {ours: reader[theirs] for ours, theirs in names.items() if not is_frozen(ours)}
    trained["fc.weight"] = _ordered(trained["fc.weight"], policy)
    model.load_state_dict(trained)
    return model


def _draft_config(policy: ModelConfig) -> DraftConfig:
    """Return the config of the policy's own layer, which has the form of its last layer."""
    sizes, names = {name: getattr(policy, name) for name in SIZES}, FAMILIES[policy.model_type].mtp
    assert names is not None
    if policy.experts is not None:
        sizes["ffn_size"] = policy.experts.shared_ffn_size
    return DraftConfig(
        architecture=MTP,
        rope=policy.rope,
        form=LayerForm(
            has_qkv_bias=policy.has_qkv_bias,
            has_qk_norm=policy.has_qk_norm,
            experts=policy.experts,
            has_zero_first=names.has_zero_first,
        ),
        **sizes,
    )


def _read_experts(
    reader: HfReader, policy: ModelConfig, names: Mapping[str, str], like: Tensor
) -> FrozenExperts:
    """Return router and routed experts in the dtype and on the device of `like`."""
    assert policy.experts is not None
    mlp, wide = "layers.0.mlp.", wide_dtype(like.dtype)
    numbers = range(policy.experts.num_experts)

    def read(name: str, dtype: torch.dtype = like.dtype) -> Tensor:
        return reader[names[mlp + name]].to(like.device, dtype)

    def read_expert(number: int, *parts: str) -> Tensor:
        return torch.cat([read(f"experts.{number}.{part}_proj.weight") for part in parts])

    bias = f"gate.{ROUTER_BIAS}"
    return FrozenExperts(
        config=policy.experts,
        router_ED=read("gate.weight", wide),
        bias_E=read(bias, wide) if mlp + bias in names else None,
        gate_up_EFD=torch.stack([read_expert(number, "gate", "up") for number in numbers]),
        down_EDF=torch.stack([read_expert(number, "down") for number in numbers]),
    )


def save_with_own_layer(out: Path, source: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the model `source` to the new folder `out`, with a drafter's weights as its layer."""
    policy, reader = load_model_config(source), HfReader(source)
    kept = ((name, reader[name]) for name in tensor_shapes(policy))
    tensors = itertools.chain(kept, own_tensors(weights, policy))
    save_hf_model(out, tensors, source, dtype=reader[EMBEDDING].dtype)


def save_own_layer(folder: Path, source: Path, dtype: torch.dtype) -> None:
    """Write the layers for MTP of the model `source`, if it has any, beside a torch_dist checkpoint
    of its policy. Copies of embedding and LM head are left out.
    """
    policy, reader = load_model_config(source), HfReader(source)
    names = stored_layers(policy, reader.names())
    names = [name for name in names if name not in copied_parts(policy, names)]
    if names:
        tensors = {name: reader[name].to(dtype_of(name, dtype)) for name in names}
        save_tensors(tensors, folder / BESIDE_POLICY)


def read_own_layer(checkpoint: Path, policy: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the layer that a torch_dist checkpoint has: of `save_own_layer`, or as
    the run trained it.
    """
    beside, drafter = checkpoint / BESIDE_POLICY, checkpoint.parent / "drafter"
    if beside.is_file():
        with safe_open(beside, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
    elif (config := drafter / "config.json").is_file() and read_json(config).get(
        "architectures"
    ) == [MTP]:
        yield from own_tensors(read_tensors(drafter / SINGLE_NAME), policy)


def own_tensors(weights: Mapping[str, Tensor], policy: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield a drafter's weights under the checkpoint's names."""
    names = own_names(policy)
    for ours, tensor in weights.items():
        yield names[ours], _ordered(tensor, policy) if ours == "fc.weight" else tensor


def _ordered(fusion_D2D: Tensor, policy: ModelConfig) -> Tensor:
    """Swap the halves of the fusion's inputs, if the checkpoint has the hidden state first: a
    drafter has the embedding first.
    """
    names = FAMILIES[policy.model_type].mtp
    assert names is not None
    if not names.is_hidden_first:
        return fusion_D2D
    return torch.cat(fusion_D2D.chunk(2, dim=1)[::-1], dim=1)
