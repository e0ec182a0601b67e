"""Reads the mixture of experts of a config.json: Qwen3-MoE and GLM-4.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt_megatron.config.ranges import read_flag, read_number, read_size, require


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts that replaces the MLP in `layers`.

    A token goes to the `num_per_token` experts with the largest scores of the router: their
    softmax, or with `is_sigmoid` each score's sigmoid plus a bias, which has no part in the
    weights.
    """

    num_experts: int
    num_per_token: int
    ffn_size: int  # of one expert
    normalizes: bool  # the weights of a token's experts add up to 1, before `scaling`
    layers: tuple[int, ...]
    is_sigmoid: bool = False
    scaling: float = 1.0  # of the weights
    shared_ffn_size: int = 0  # of the experts that every token goes to; 0: none


def read_experts(hf: Mapping[str, Any]) -> ExpertsConfig:
    """Return the experts of a model of a family that has them. ValueError names a bad key."""
    read = _read_glm if hf["model_type"] == "glm4_moe" else _read_qwen
    experts = read(hf, read_size(hf, "num_hidden_layers"))
    count, most = experts.num_per_token, experts.num_experts
    require(count <= most, "num_experts_per_tok", count, f"<= num_experts={most}")
    rule = "false where num_experts_per_tok=1: the router would have no gradient"
    require(not experts.normalizes or count > 1, "norm_topk_prob", True, rule)
    return experts


def _read_qwen(hf: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    dense = hf.get("mlp_only_layers") or []
    are_layers = isinstance(dense, list) and all(layer in range(num_layers) for layer in dense)
    require(are_layers, "mlp_only_layers", dense, f"a list of layers in 0..{num_layers - 1}")
    step = read_size(hf, "decoder_sparse_step", 1)
    layers = tuple(n for n in range(num_layers) if n not in dense and (n + 1) % step == 0)
    if not layers:
        raise ValueError(
            f"decoder_sparse_step={step} and mlp_only_layers={dense} leave no layer with experts"
        )
    return ExpertsConfig(
        num_experts=_num_experts(hf, "num_experts"),
        num_per_token=read_size(hf, "num_experts_per_tok", 8),
        ffn_size=read_size(hf, "moe_intermediate_size", 768),
        normalizes=read_flag(hf, "norm_topk_prob", False),
        layers=layers,
    )


def _read_glm(hf: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    for option, allowed in (("n_group", 1), ("topk_group", 1), ("norm_topk_prob", True)):
        if hf.get(option, allowed) != allowed:
            raise ValueError(f"{option}={hf[option]!r} is not supported; only {allowed!r}")
    first = hf.get("first_k_dense_replace", 1)
    is_layer = type(first) is int and first in range(num_layers)
    require(is_layer, "first_k_dense_replace", first, f"in 0..{num_layers - 1}")
    ffn_size = read_size(hf, "moe_intermediate_size", 1408)
    count = read_size(hf, "num_experts_per_tok", 8)
    rule = (
        "> 1 with norm_topk_prob=true, which this family needs: the router would have no gradient"
    )
    require(count > 1, "num_experts_per_tok", count, rule)
    return ExpertsConfig(
        num_experts=_num_experts(hf, "n_routed_experts"),
        num_per_token=count,
        ffn_size=ffn_size,
        normalizes=True,
        layers=tuple(range(first, num_layers)),
        is_sigmoid=True,
        scaling=read_number(hf, "routed_scaling_factor", 1.0),
        shared_ffn_size=ffn_size * read_size(hf, "n_shared_experts", 1),
    )


def _num_experts(hf: Mapping[str, Any], name: str) -> int:
    """Transformers 5 writes `num_local_experts` for some families."""
    return read_size(hf, "num_local_experts" if "num_local_experts" in hf else name, 128, most=4096)
