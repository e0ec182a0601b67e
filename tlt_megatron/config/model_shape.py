"""Reads the shape of a decoder-only policy from config.json: Llama, Mistral, Qwen2/2.5, Qwen3, Qwen3-MoE.

It imports neither torch nor transformers, so an unsupported model is rejected before they are
loaded. Defaults of absent keys are those of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROPE_KINDS = {  # and what config.json must say of each
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_DEFAULT_THETA = 10000.0
_DEFAULT_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What tells one Llama-like family from the others.

    From it follow the tensors, Megatron's settings and the weight map. The numbers replace keys
    that config.json lacks.
    """

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / query heads
    has_experts: bool = False


FAMILIES = {  # by model_type of config.json
    "llama": Family(),
    "mistral": Family(num_kv_heads=8),
    "qwen2": Family(has_qkv_bias=True, num_kv_heads=32),
    "qwen3": Family(has_qk_norm=True, num_kv_heads=32, head_dim=128),
    "qwen3_moe": Family(has_qk_norm=True, num_kv_heads=4, has_experts=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one of `ROPE_KINDS`, with the names of transformers."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192  # of llama3 and yarn
    low_freq_factor: float = 1.0  # of llama3; so is the next
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # of yarn; so are the next ones
    beta_slow: float = 1.0
    truncate: bool = True  # the bounds of the blend are whole channel pairs
    attention_factor: float = 1.0  # cos and sin are multiplied by it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts that replaces the MLP in `layers`.

    A token goes to the `num_per_token` experts with the largest softmax of the router.
    """

    num_experts: int
    num_per_token: int
    ffn_size: int  # of one expert
    normalizes: bool  # the weights of a token's experts add up to 1
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of one model: D hidden_size, F ffn_size, N/K query/kv heads, H head_dim, L, V."""

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    experts: ExpertsConfig | None = None  # None: every layer is dense

    def has_experts_in(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. ValueError names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must hold a JSON object, not a {type(value).__name__}")
    return value


def load_model_config(path: str | Path, key: str = "model.path") -> ModelConfig:
    """Read `config.json` in the folder `path`. ValueError for an unsupported family or option.

    `key` is the setting that holds the path.
    """
    file = Path(path) / "config.json"
    if not str(path) or not file.is_file():
        raise ValueError(
            f"{key}={str(path)!r}: must be a folder with config.json and safetensors (GGUF cannot be trained)"
        )
    hf = read_json(file)
    try:
        return _model_config(hf)
    except ValueError as error:
        raise ValueError(f"{key}={str(path)!r}: config.json {error}") from error


def _model_config(hf: Mapping[str, Any]) -> ModelConfig:
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        allowed = ", ".join(FAMILIES)
        raise ValueError(f"model_type={kind!r} is not supported; must be one of {allowed}")
    family = FAMILIES[kind]
    _check_options(hf)
    heads = _size(hf, "num_attention_heads")
    kv_heads = _size(hf, "num_key_value_heads", family.num_kv_heads or heads, heads)
    hidden = _size(hf, "hidden_size")
    head_dim = _size(hf, "head_dim", family.head_dim or hidden // heads, hidden // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: must be even, rotary embeddings turn pairs")
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    rope = rope_config(hf)
    positions = _size(hf, "max_position_embeddings")
    if rope.kind == "yarn":  # Qwen's folders keep the number of the context before the scaling
        positions = max(positions, int(rope.factor * rope.original_max_position_embeddings))
    return ModelConfig(
        model_type=kind,
        vocab_size=_size(hf, "vocab_size"),
        hidden_size=hidden,
        ffn_size=_size(hf, "intermediate_size"),
        num_layers=_size(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(hf, "rms_norm_eps", _DEFAULT_EPS),
        rope=rope,
        max_position_embeddings=positions,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        has_qkv_bias=family.has_qkv_bias,
        has_qk_norm=family.has_qk_norm,
        experts=_experts_config(hf) if family.has_experts else None,
    )


def _experts_config(hf: Mapping[str, Any]) -> ExpertsConfig:
    """Read the experts of a Qwen3-MoE; transformers 5 writes `num_local_experts`."""
    num_layers = _size(hf, "num_hidden_layers")
    name = "num_local_experts" if "num_local_experts" in hf else "num_experts"
    num_experts = _size(hf, name, 128)
    per_token = _size(hf, "num_experts_per_tok", 8)
    if per_token > num_experts:
        raise ValueError(f"num_experts_per_tok={per_token} must be <= {name}={num_experts}")
    normalizes = hf.get("norm_topk_prob", False)
    if normalizes and per_token == 1:
        raise ValueError(
            "norm_topk_prob=true with num_experts_per_tok=1: must be false, the router would have no gradient"
        )
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(layer not in range(num_layers) for layer in dense):
        raise ValueError(
            f"mlp_only_layers={dense!r}: must be a list of layers in 0..{num_layers - 1}"
        )
    step = _size(hf, "decoder_sparse_step", 1)
    layers = tuple(n for n in range(num_layers) if n not in dense and (n + 1) % step == 0)
    if not layers:
        raise ValueError(
            f"decoder_sparse_step={step} and mlp_only_layers={dense} leave no layer with experts"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=per_token,
        ffn_size=_size(hf, "moe_intermediate_size", 768),
        normalizes=bool(normalizes),
        layers=layers,
    )


def _check_options(hf: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that would compute another function of the same tensors."""
    kind = hf["model_type"]
    for option, allowed in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("is_encoder_decoder", False),
        *([("sliding_window", None)] if kind == "mistral" else []),
    ):
        value = hf.get(option, allowed)
        if value != allowed:
            raise ValueError(f"{option}={value!r} is not supported; only {allowed!r}")
    if not FAMILIES[kind].has_qkv_bias and hf.get("attention_bias", False):
        raise ValueError(
            f"attention_bias=True is not supported for {kind} (it also puts a bias on o_proj)"
        )
    layer_types = hf.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"layer_types={layer_types!r}: must be a list")
    for other in layer_types:
        if other != "full_attention":
            raise ValueError(f"layer_types with {other} is not supported; only full_attention")


def _size(
    hf: Mapping[str, Any], name: str, absent: int | None = None, null: int | None = None
) -> int:
    value = hf.get(name, absent)
    value = null if value is None else value
    if value is None:
        raise ValueError(f"lacks {name}")
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: must be an integer >= 1")
    return value


def _number(hf: Mapping[str, Any], name: str, absent: float) -> float:
    value = hf.get(name, absent)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}={value!r}: must be a number > 0")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be finite")
    return float(value)


def rope_config(hf: Mapping[str, Any]) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older)."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters={rope!r}: must be an object")
    rope = {"rope_theta": hf.get("rope_theta", _DEFAULT_THETA)} | rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"rope_type={kind!r} is not supported; must be one of {', '.join(ROPE_KINDS)}"
        )
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={partial!r} is not supported; only 1.0")
    missing = [name for name in ROPE_KINDS[kind] if rope.get(name) is None]
    if missing:
        raise ValueError(f"rope_type={kind!r} lacks {', '.join(missing)}")
    scaling: dict[str, Any] = {name: _number(rope, name, 0.0) for name in ROPE_KINDS[kind]}
    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        scaling[name] = _size(rope, name, hf["max_position_embeddings"])
    if kind == "yarn":
        scaling |= _yarn(rope)
    return RopeConfig(theta=_number(rope, "rope_theta", _DEFAULT_THETA), kind=kind, **scaling)


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that YaRN has alone; defaults are those of transformers. arXiv 2309.00071."""
    given = {name: value for name, value in rope.items() if value is not None}
    factor = _number(given, "factor", 1.0)

    def strength(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    attention = strength(1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        attention = strength(_number(given, "mscale", 1.0))
        attention /= strength(_number(given, "mscale_all_dim", 1.0))
    truncate = given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"truncate={truncate!r}: must be true or false")
    return {
        "beta_fast": _number(given, "beta_fast", 32.0),
        "beta_slow": _number(given, "beta_slow", 1.0),
        "truncate": truncate,
        "attention_factor": _number(given, "attention_factor", attention),
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by Hugging Face name. Tied embeddings have no lm_head."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, ffn, vocab = config.hidden_size, config.ffn_size, config.vocab_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
    }
    if config.has_qkv_bias:
        layer |= {f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", heads), ("k", kv), ("v", kv))}
    if config.has_qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    mlp = _mlp_shapes("mlp", hidden, ffn)
    sparse = {}
    if config.experts is not None:
        sparse["mlp.gate.weight"] = (config.experts.num_experts, hidden)
        for expert in range(config.experts.num_experts):
            sparse |= _mlp_shapes(f"mlp.experts.{expert}", hidden, config.experts.ffn_size)
    for number in range(config.num_layers):
        own = layer | (sparse if config.has_experts_in(number) else mlp)
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in own.items()}
    return shapes


def _mlp_shapes(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (ffn, hidden),
        f"{prefix}.up_proj.weight": (ffn, hidden),
        f"{prefix}.down_proj.weight": (hidden, ffn),
    }


def read_eos_token_ids(folder: Path, vocab_size: int | None = None) -> list[int]:
    """Return the stop tokens in config.json and generation_config.json, in no particular order.

    ValueError names the file and the value if it is not a token id or is not below `vocab_size`.
    """
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        eos = read_json(file).get("eos_token_id") if file.is_file() else None
        if eos is None:
            continue
        token_ids = eos if isinstance(eos, list) else [eos]
        if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
            raise ValueError(
                f"{file}: eos_token_id={eos!r} must be an integer or a list of integers >= 0"
            )
        if vocab_size is not None and any(token_id >= vocab_size for token_id in token_ids):
            raise ValueError(f"{file}: eos_token_id={eos!r} must be < vocab_size={vocab_size}")
        found += token_ids
    return found
