"""The shape of a decoder-only policy, read once from a Hugging Face config; the embedded engine, the drafter and
the Megatron builder all build from this record. Families: Llama, Qwen2/2.5, Qwen3 (dense)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `kind` "default", "linear" or "llama3"; the llama3 fields are those of Llama 3.1."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one model. D = hidden_size, F = ffn_size, N/K = query/kv heads, H = head_dim, L, V."""

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


def load_model_config(path: str | Path) -> ModelConfig:
    """Read `config.json` in the folder `path`. ValueError for a family or an option that is not supported."""
    from transformers import AutoConfig

    hf = AutoConfig.from_pretrained(path)
    if hf.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model_type={hf.model_type!r} of {path} is not supported; one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    for option, allowed in (("hidden_act", "silu"), ("mlp_bias", False)):
        value = getattr(hf, option, allowed)
        if value != allowed:
            raise ValueError(f"{option}={value!r} of {path} is not supported; only {allowed!r}")
    if hf.model_type == "qwen2":
        has_qkv_bias = True
    else:
        has_qkv_bias = bool(getattr(hf, "attention_bias", False))
        if has_qkv_bias:
            raise ValueError(
                f"attention_bias=True of {path} is not supported for {hf.model_type} (it also puts a bias on o_proj)"
            )
    if getattr(hf, "use_sliding_window", False):
        raise ValueError(f"use_sliding_window=True of {path} is not supported")
    return ModelConfig(
        model_type=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        ffn_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        rope=_rope_config(hf.rope_parameters, path),
        max_position_embeddings=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        has_qkv_bias=has_qkv_bias,
        has_qk_norm=hf.model_type == "qwen3",
    )


def _rope_config(rope: dict[str, object], path: str | Path) -> RopeConfig:
    kind = str(rope.get("rope_type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"rope_type={kind!r} of {path} is not supported; default, linear or llama3"
        )
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RopeConfig(
        theta=float(rope["rope_theta"]), kind=kind, **{f: rope[f] for f in fields if f in rope}
    )
