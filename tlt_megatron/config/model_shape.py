"""Reads the shape of a decoder-only policy from config.json, of the families of `FAMILIES`.

It imports neither torch nor transformers, so an unsupported model is rejected before they are
loaded. Defaults of absent keys are those of transformers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_megatron.config.experts_shape import ExpertsConfig, read_experts
from tlt_megatron.config.ranges import read_flag, read_number, read_size, require
from tlt_megatron.saved_files import MALFORMED, read_json

ROPE_KINDS = {  # and what config.json must say of each
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_MOST_LAYERS = 2_000  # each tensor of a model is named: a crafted number would fill the memory
_DEFAULT_THETA = 10000.0
_MISTRAL_WINDOW = 4096
ROUTER_BIAS = "e_score_correction_bias"  # in float32 whatever the other tensors are


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """The names of a family's layer that predicts a further token (MTP): a decoder layer with a
    fusion of embedding and hidden state before it and a norm after it.
    """

    prefix: str  # of every layer of this kind, with the number of the policy's layers
    first: str  # of the first layer of this kind, after the prefix
    embedding_norm: str
    hidden_norm: str
    fusion: str  # [D, 2D]
    final_norm: str
    is_hidden_first: bool = False  # the fusion's input is [hidden; embedding]
    has_zero_first: bool = False  # the embedding at position 0 counts as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What tells one Llama-like family from the others.

    From it follow the tensors, Megatron's settings and the weight map. The numbers replace keys
    that config.json lacks.
    """

    # None: config.json says it by attention_bias, and o_proj has no bias either way
    has_qkv_bias: bool | None = False
    has_qk_norm: bool | None = False  # None: as use_qk_norm says
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / query heads
    has_experts: bool = False
    rms_norm_eps: float = 1e-6
    partial_rotary_factor: float = 1.0
    mtp: MtpNames | None = None


FAMILIES = {  # by model_type of config.json
    "llama": Family(),
    "mistral": Family(num_kv_heads=8),
    "qwen2": Family(has_qkv_bias=True, num_kv_heads=32),
    "qwen3": Family(has_qk_norm=True, num_kv_heads=32, head_dim=128),
    "qwen3_moe": Family(has_qk_norm=True, num_kv_heads=4, has_experts=True),
    "glm4_moe": Family(
        has_qkv_bias=None,
        has_qk_norm=None,
        num_kv_heads=8,
        has_experts=True,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        mtp=MtpNames(
            prefix="model.layers.{num_layers}.",
            first="",
            embedding_norm="enorm",
            hidden_norm="hnorm",
            fusion="eh_proj",
            final_norm="shared_head.norm",
        ),
    ),
    "mimo": Family(
        has_qkv_bias=True,
        num_kv_heads=32,
        mtp=MtpNames(
            prefix="model.mtp_layers.",
            first="0.",
            embedding_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            fusion="input_proj",
            final_norm="final_layernorm",
            is_hidden_first=True,
            has_zero_first=True,
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one of `ROPE_KINDS`, with the names of transformers."""

    theta: float
    kind: str = "default"
    partial_rotary_factor: float = 1.0  # share of a head's channels that turn, the first ones
    factor: float = 1.0
    original_max_position_embeddings: int = 8192  # of llama3 and yarn
    low_freq_factor: float = 1.0  # of llama3; so is the next
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # of yarn; so are the next ones
    beta_slow: float = 1.0
    truncate: bool = True  # the bounds of the blend are whole channel pairs
    attention_factor: float = 1.0  # cos and sin are multiplied by it


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

    @property
    def rotary_dim(self) -> int:
        """Return the channels of a head that turn with the position."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    def has_experts_in(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers


def check_not_of_run(key: str, path: str | Path, part: str) -> None:
    """Raise ValueError if `path` is a run or a checkpoint of one, and say which folder to give: its
    `part`, hf or hf_drafter.
    """
    folder = Path(path)
    if not str(path) or (folder / "config.json").is_file():
        return
    is_run = (folder / "config.yaml").is_file()
    if is_run and (folder / part).is_dir():
        raise ValueError(f"{key}={str(path)!r}: is a run: give {folder / part}")
    is_saved = any(
        (folder / name).exists()
        for name in ("manifest.json", "latest_checkpointed_iteration.txt", "common.pt")
    )
    if is_run or is_saved:
        convert = shlex.join(["tlt", "convert", "--from", str(path), "--to", f"{path}/hf"])
        advice = f"{convert} makes a model of its checkpoint"
        if part != "hf":
            advice = "give the folder drafter of one of its checkpoints"
        kind = f"a run without {part}" if is_run else "a checkpoint"
        raise ValueError(f"{key}={str(path)!r}: is {kind}: {advice}")


def load_model_config(path: str | Path, key: str = "model.path") -> ModelConfig:
    """Read `config.json` in the folder `path`. ValueError for an unsupported family or option.

    `key` is the setting that holds the path.
    """
    file = Path(path) / "config.json"
    check_not_of_run(key, path, "hf")
    rule = "a folder with config.json and safetensors (GGUF cannot be trained)"
    require(bool(str(path)) and file.is_file(), key, str(path), rule)
    hf = read_json(file)
    try:
        return _model_config(hf)
    except MALFORMED as error:
        raise ValueError(f"{key}={str(path)!r}: config.json {error}") from error


def _model_config(hf: Mapping[str, Any]) -> ModelConfig:
    kind = hf.get("model_type", "")
    require(
        isinstance(kind, str) and kind in FAMILIES,
        "model_type",
        kind,
        f"one of {', '.join(FAMILIES)}",
    )
    family = FAMILIES[kind]
    _check_options(hf)
    heads = read_size(hf, "num_attention_heads")
    kv_heads = read_size(hf, "num_key_value_heads", family.num_kv_heads or heads, heads)
    hidden = read_size(hf, "hidden_size")
    head_dim = read_size(hf, "head_dim", family.head_dim or hidden // heads, hidden // heads)
    rope = rope_config(hf, family.partial_rotary_factor)
    is_even = head_dim % 2 == 0 and int(head_dim * rope.partial_rotary_factor) % 2 == 0
    require(is_even, "head_dim", head_dim, "even, rotary embeddings turn pairs")
    rule = f"a multiple of num_key_value_heads={kv_heads}"
    require(heads % kv_heads == 0, "num_attention_heads", heads, rule)
    positions = read_size(hf, "max_position_embeddings")
    if rope.kind == "yarn":  # Qwen's folders keep the number of the context before the scaling
        positions = max(positions, int(rope.factor * rope.original_max_position_embeddings))
    return ModelConfig(
        model_type=kind,
        vocab_size=read_size(hf, "vocab_size"),
        hidden_size=hidden,
        ffn_size=read_size(hf, "intermediate_size"),
        num_layers=read_size(hf, "num_hidden_layers", most=_MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read_number(hf, "rms_norm_eps", family.rms_norm_eps),
        rope=rope,
        max_position_embeddings=positions,
        tie_word_embeddings=read_flag(hf, "tie_word_embeddings", False),
        has_qkv_bias=_flag(hf, "attention_bias", family.has_qkv_bias),
        has_qk_norm=_flag(hf, "use_qk_norm", family.has_qk_norm),
        experts=read_experts(hf) if family.has_experts else None,
    )


def _flag(hf: Mapping[str, Any], name: str, fixed: bool | None) -> bool:
    return read_flag(hf, name, False) if fixed is None else fixed


def _check_options(hf: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that would compute another function of the same tensors."""
    kind = hf["model_type"]
    for option, allowed in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("is_encoder_decoder", False),
    ):
        value = hf.get(option, allowed)
        require(value == allowed, option, value, repr(allowed))
    if kind == "mistral":
        _check_window(hf)
    has_bias = read_flag(hf, "attention_bias", False)
    rule = f"false for {kind} (it also puts a bias on o_proj)"
    can_have = FAMILIES[kind].has_qkv_bias is not False
    require(can_have or not has_bias, "attention_bias", has_bias, rule)
    types = hf.get("layer_types") or []
    require(isinstance(types, list), "layer_types", types, "a list")
    for layer, each in enumerate(types):
        require(each == "full_attention", f"layer_types[{layer}]", each, "'full_attention'")


def _check_window(hf: Mapping[str, Any]) -> None:
    """Raise ValueError for a window that is shorter than the context: without the key it is 4096 in
    transformers.
    """
    window = hf.get("sliding_window", _MISTRAL_WINDOW)
    positions = read_size(hf, "max_position_embeddings")
    is_whole = window is None or (type(window) is int and window >= positions)
    shown = "null" if "sliding_window" in hf else f"null, without the key it is {window}"
    require(is_whole, "sliding_window", window, f"{shown} (max_position_embeddings={positions})")


def rope_config(hf: Mapping[str, Any], partial_rotary_factor: float = 1.0) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older).

    `partial_rotary_factor` is that of the family. It counts where config.json does not say it.
    """
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    require(isinstance(rope, dict), "rope_parameters", rope, "an object")
    for name, value in rope.items():
        rule = "a value for all layers, not one for each type of layer"
        require(not isinstance(value, dict), f"rope_parameters.{name}", value, rule)
    rope = {"rope_theta": hf.get("rope_theta", _DEFAULT_THETA)} | rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(kind in [*ROPE_KINDS], "rope_type", kind, f"one of {', '.join(ROPE_KINDS)}")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    partial = partial_rotary_factor if partial is None else partial
    is_known = partial in (1, partial_rotary_factor)
    require(is_known, "partial_rotary_factor", partial, str(partial_rotary_factor))
    missing = [name for name in ROPE_KINDS[kind] if rope.get(name) is None]
    if missing:
        raise ValueError(f"rope_type={kind!r} lacks {', '.join(missing)}")
    scaling: dict[str, Any] = {name: read_number(rope, name, 0.0) for name in ROPE_KINDS[kind]}
    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        beside = hf.get(name)  # of rope_scaling: it counts first in transformers
        within = rope.get(name)
        agrees = beside is None or within in (None, beside)
        require(agrees, name, beside, f"{within}, as in rope_scaling")
        scaling[name] = read_size(
            {name: beside or within}, name, None, hf.get("max_position_embeddings")
        )
    if kind == "yarn":
        scaling |= _yarn(rope)
    scaling["partial_rotary_factor"] = float(partial)
    return RopeConfig(theta=read_number(rope, "rope_theta", _DEFAULT_THETA), kind=kind, **scaling)


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that YaRN has alone; defaults are those of transformers. arXiv
    2309.00071.
    """
    given = {name: value for name, value in rope.items() if value is not None}
    factor = read_number(given, "factor", 1.0)

    def strength(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    attention = strength(1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        attention = strength(read_number(given, "mscale", 1.0))
        attention /= strength(read_number(given, "mscale_all_dim", 1.0))
    truncate = given.get("truncate", True)
    require(isinstance(truncate, bool), "truncate", truncate, "true or false")
    fast, slow = read_number(given, "beta_fast", 32.0), read_number(given, "beta_slow", 1.0)
    require(fast > slow, "beta_fast", fast, f"above beta_slow={slow:g}")
    return {
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": truncate,
        "attention_factor": read_number(given, "attention_factor", attention),
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
        if config.experts.is_sigmoid:
            sparse[f"mlp.gate.{ROUTER_BIAS}"] = (config.experts.num_experts,)
        if shared := config.experts.shared_ffn_size:
            sparse |= _mlp_shapes("mlp.shared_experts", hidden, shared)
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
        name, rule = f"{file}: eos_token_id", "an integer or a list of integers >= 0"
        require(all(type(t) is int and t >= 0 for t in token_ids), name, eos, rule)
        fits = vocab_size is None or all(token_id < vocab_size for token_id in token_ids)
        require(fits, name, eos, f"< vocab_size={vocab_size}")
        found += token_ids
    return found
