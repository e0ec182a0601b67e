"""Reads and checks a drafter's folder without torch: config.json and the headers of the weights.

EAGLE and EAGLE-3 are published in several forms: as SGLang and SpecForge write them, as vLLM reads
them, and as speculators writes them. `read_draft_settings` returns the same settings for all.
`check_drafter` refuses before launch what this trainer would compute in another way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tlt_megatron.config.model_folder import (
    EMBEDDING,
    HEAD,
    check_no_adapter,
    check_shapes,
    name_setting,
)
from tlt_megatron.config.model_shape import ModelConfig, check_not_of_run, rope_config
from tlt_megatron.config.ranges import read_number, read_size, require
from tlt_megatron.config.weight_files import (
    StoredTensor,
    check_not_quantized,
    find_tensors,
    has_same_values,
    read_bytes,
)
from tlt_megatron.saved_files import MALFORMED, read_json

log = logging.getLogger(__name__)

ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}  # SGLang's
MTP = "mtp"  # the checkpoint's own layer, see own_layer.py: no folder of its own
_FOREIGN_ARCHITECTURES = {  # the names of vLLM, and of speculators
    "EagleLlamaForCausalLM": "LlamaForCausalLMEagle",
    "Eagle3LlamaForCausalLM": "LlamaForCausalLMEagle3",
    "Eagle3Speculator": "LlamaForCausalLMEagle3",
    "Eagle3DraftModel": "LlamaForCausalLMEagle3",
}
SIZES = {  # ours -> Hugging Face's
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}
NUM_AUX_LAYERS = 3  # low, middle, high
AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NORM_BEFORE_RESIDUAL = "norm_before_residual"
BORROWED = _EMBEDDING, _HEAD, _IDS, _KEPT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
# Options of SGLang, vLLM, SpecForge and speculators that change what the same tensors compute, with
# the values that change nothing. They count at the top level and in eagle_config.
_OFF = (None, False)
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (None, 1),
    "norm_output": _OFF,
    "norm_before_fc": _OFF,
    "fc_norm": _OFF,
    "use_aux_norm": _OFF,
    "add_para_norm": _OFF,
    "layernorms": _OFF,
    "attention_bias": _OFF,
    "qkv_bias": _OFF,
    "mlp_bias": _OFF,
    "use_qk_norm": _OFF,
    "use_sliding_window": _OFF,
    "parallel_drafting": _OFF,
    "use_aux_hidden_state": (None, True),
    "num_aux_hidden_states": (None, NUM_AUX_LAYERS),
    "is_causal": (None, True),
    "logit_scale": (None, 1),
    "hidden_act": (None, "silu"),
    # the layers of EAGLE-3 under names that no engine reads for it
    **dict.fromkeys(("target_layer_ids", "aux_hidden_state_layer_ids", "dflash_config"), (None,)),
}
# Other keys of a config.json that have no effect on a drafter, or that are read below.
_KNOWN = {
    *_OPTIONS,
    *SIZES.values(),
    *("architectures", "eagle_config", AUX_LAYER_IDS, "tlt_megatron", "transformer_layer_config"),
    *("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"),
    *("partial_rotary_factor", "quantization_config", "compression_config", "layer_types"),
    *("draft_vocab_size", "hot_vocab_size", "target_hidden_size", "tie_word_embeddings"),
    *(NORM_BEFORE_RESIDUAL, "fusion_bias", "bias", "torch_dtype", "dtype", "model_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "use_cache", "auto_map"),
    *("initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp", "_name_or_path"),
    *("transformers_version", "rope_interleaved", "sliding_window", "max_window_layers", "id2label"),
    *("label2id", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
    *("speculators_model_type", "speculators_config", "speculators_version", "has_no_defaults_at_init"),
    *("embed_requires_grad", "verifier", "modal_type", "target_model_type", "is_encoder_decoder"),
    *("is_decoder", "problem_type", "finetuning_task", "tokenizer_class", "target_layer_count"),
}  # fmt: skip


def read_draft_settings(
    path: str | Path, *, num_layers: int | None = None, needs_whole_head: bool = True
) -> dict[str, Any]:
    """Return the checked settings, with SGLang's names, head_dim and the layers of EAGLE-3 in
    `AUX_LAYER_IDS`. ValueError says what is missing or unsupported.

    `num_layers` of the target gives the layers that config.json does not name. `needs_whole_head`:
    False where SGLang runs the drafter and nothing trains it.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{path}: must be a folder with config.json")
    raw = read_json(file)
    try:
        return _settings(raw, num_layers, needs_whole_head)
    except MALFORMED as error:
        raise ValueError(f"{file}: {error}") from error


def read_architecture(path: str | Path) -> str:
    """Return SGLang's name of the architecture. For a checked folder."""
    return _architecture(read_json(Path(path) / "config.json"))


def _settings(
    raw: Mapping[str, Any], num_layers: int | None, needs_whole_head: bool
) -> dict[str, Any]:
    inner = raw.get("transformer_layer_config") or {}
    eagle = raw.get("eagle_config") or {}
    for name, value in (("transformer_layer_config", inner), ("eagle_config", eagle)):
        require(isinstance(value, dict), name, value, "an object")
    hf = {**inner, **raw}
    hf["architectures"] = [_architecture(hf)]
    for name in SIZES.values():
        if name == "rms_norm_eps":
            hf[name] = read_number(hf, name, 1e-6)
        elif name != "head_dim":
            absent = hf["num_attention_heads"] if name == "num_key_value_heads" else None
            hf[name] = read_size(hf, name, absent)
    if hf.get("head_dim") is None:
        hf["head_dim"] = hf["hidden_size"] // hf["num_attention_heads"]
    _check_options(hf, eagle, needs_whole_head)
    rope_config(hf)
    residual = _either(hf, eagle, NORM_BEFORE_RESIDUAL)
    is_eagle3 = hf["architectures"] == [ARCHITECTURES["eagle3"]]
    require(isinstance(residual, bool | None), NORM_BEFORE_RESIDUAL, residual, "true or false")
    rule = "false for EAGLE, which has no norm there"
    require(is_eagle3 or not residual, NORM_BEFORE_RESIDUAL, residual, rule)
    if residual is None and "speculators_model_type" in raw:  # its default has changed
        raise ValueError(f"lacks {NORM_BEFORE_RESIDUAL}, true or false as the drafter was trained")
    hf[NORM_BEFORE_RESIDUAL] = bool(residual)
    hf[AUX_LAYER_IDS] = _aux_layer_ids(hf, eagle, num_layers) if is_eagle3 else []
    return hf


def _architecture(hf: Mapping[str, Any]) -> str:
    names = hf.get("architectures")
    found = names[0] if isinstance(names, list) and names else names
    if found == MTP:
        raise ValueError(
            "is the MTP layer of a policy: hf/ of its run holds it, and tlt convert --from RUN writes it"
        )
    known = [*ARCHITECTURES.values(), *_FOREIGN_ARCHITECTURES]
    require(found in known, "architectures", found, f"one of {', '.join(known)}")
    assert isinstance(found, str)
    return _FOREIGN_ARCHITECTURES.get(found, found)


def _either(hf: Mapping[str, Any], eagle: Mapping[str, Any], name: str) -> Any:
    """Return an option of eagle_config, else of the top level; None: neither has it."""
    return hf.get(name) if eagle.get(name) is None else eagle[name]


def _check_options(hf: Mapping[str, Any], eagle: Mapping[str, Any], needs_whole_head: bool) -> None:
    """Raise ValueError for an option that computes something else from the same tensors."""
    options = _OPTIONS | {"target_hidden_size": (None, hf["hidden_size"])}
    if needs_whole_head:
        options |= dict.fromkeys(("draft_vocab_size", "hot_vocab_size"), (None, hf["vocab_size"]))
    if hf["architectures"] == [ARCHITECTURES["eagle3"]]:
        options |= dict.fromkeys(("bias", "fusion_bias"), _OFF)  # of fc
    else:  # the token ids of fewer rows are EAGLE-3's
        options["draft_vocab_size"] = (None, hf["vocab_size"])
    for section, where in ((hf, ""), (eagle, "eagle_config.")):
        for name, allowed in options.items():
            value = section.get(name)
            if value not in allowed:
                shown = " or ".join(repr(each) for each in allowed if each is not None) or "null"
                raise ValueError(f"{where}{name}={value!r} is not supported; only {shown}")
    types = hf.get("layer_types") or []
    are_full = isinstance(types, list) and {*types} <= {"full_attention"}
    require(are_full, "layer_types", types, "a list of 'full_attention'")
    unknown = sorted({*eagle} - {*options, NORM_BEFORE_RESIDUAL, AUX_LAYER_IDS})
    if unknown:
        raise ValueError(
            f"eagle_config has {', '.join(unknown)}: unknown, and may change what the drafter computes;"
            " remove it if it does not"
        )


def _aux_layer_ids(
    hf: Mapping[str, Any], eagle: Mapping[str, Any], num_layers: int | None
) -> list[int]:
    """Return the layers after which the features are taken: those of eagle_config, as SGLang reads
    them, or those of the top level, where vLLM names the layer after each, or SGLang's default.
    """
    ids, after = eagle.get(AUX_LAYER_IDS), hf.get(AUX_LAYER_IDS)
    for name, value in ((f"eagle_config.{AUX_LAYER_IDS}", ids), (AUX_LAYER_IDS, after)):
        is_list = value is None or (isinstance(value, list) and all(type(i) is int for i in value))
        require(is_list, name, value, "a list of layer numbers")
    if after is not None:
        before = [number - 1 for number in after]
        require(ids in (None, before), AUX_LAYER_IDS, after, f"one more than eagle_config's {ids}")
        ids, name = before, AUX_LAYER_IDS
    elif ids is not None:
        name = f"eagle_config.{AUX_LAYER_IDS}"
    else:
        if num_layers is None:
            raise ValueError(f"lacks eagle_config.{AUX_LAYER_IDS}: the target must be known")
        name = f"lacks eagle_config.{AUX_LAYER_IDS}, so that SGLang's default counts"
        ids = [1, num_layers // 2 - 1, num_layers - 4]
    shift = int(name == AUX_LAYER_IDS)
    last = None if num_layers is None else num_layers - 2
    is_rising = len(ids) == NUM_AUX_LAYERS and 0 <= ids[0] < ids[1] < ids[2]
    limit = "" if last is None else f", at most {last + shift} of a target of {num_layers} layers"
    rule = f"{NUM_AUX_LAYERS} rising layer numbers from {shift}{limit}"
    fits = is_rising and (last is None or ids[2] <= last)
    require(fits, name, [number + shift for number in ids], rule)
    return ids


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return SGLang's layers 1, L/2 - 1 and L - 4; in a small model 0, (L - 2)/2 and L - 2."""
    if num_layers < 4:
        raise ValueError(
            f"drafter.algorithm='eagle3': must be eagle or hass for a policy of {num_layers} layers"
            " (eagle3 reads three of at least 4)"
        )
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    return ids if ids[0] < ids[1] < ids[2] else (0, (num_layers - 2) // 2, num_layers - 2)


def own_name(name: str, is_eagle3: bool) -> str:
    """Return our (SGLang's) name of a drafter's tensor in a file."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if is_eagle3 else name


def draft_shapes(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a drafter with `settings`, by our name."""
    is_eagle3 = settings["architectures"] == [ARCHITECTURES["eagle3"]]
    hidden, ffn, head_dim = (settings[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv = (settings[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    wide = 2 * hidden if is_eagle3 else hidden
    layer = {
        "self_attn.q_proj.weight": (heads, wide),
        "self_attn.k_proj.weight": (kv, wide),
        "self_attn.v_proj.weight": (kv, wide),
        "self_attn.o_proj.weight": (hidden, heads),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "post_attention_layernorm.weight": (hidden,),
    }
    if is_eagle3:
        layer |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    prefix = "midlayer." if is_eagle3 else "layers.0."
    shapes: dict[str, tuple[int, ...]] = {prefix + name: shape for name, shape in layer.items()}
    num_inputs = NUM_AUX_LAYERS if is_eagle3 else 2
    shapes["fc.weight"] = (hidden, num_inputs * hidden)
    return shapes | ({"norm.weight": (hidden,)} if is_eagle3 else {"fc.bias": (hidden,)})


def is_of_sglang(path: str | Path) -> bool:
    """Return whether SGLang computes with the folder as it is what this trainer does: it has
    SGLang's names, layers where SGLang reads them, and each tensor.
    """
    raw = read_json(Path(path) / "config.json")
    if raw["architectures"][0] not in ARCHITECTURES.values():
        return False
    if AUX_LAYER_IDS in raw and not (raw.get("eagle_config") or {}).get(AUX_LAYER_IDS):
        return False
    num_drafted, vocab_size = raw.get("draft_vocab_size"), raw["vocab_size"]
    if num_drafted not in (None, vocab_size):
        return True  # a head of fewer rows, which no other engine reads
    names = {*draft_shapes(read_draft_settings(path, num_layers=1 << 30))}
    return num_drafted is None and {*find_tensors(Path(path))} == names


def check_drafter(
    key: str,
    path: str | Path,
    policy: ModelConfig,
    policy_path: str | Path,
    *,
    needs_whole_head: bool = True,
    is_for_sglang: bool = False,
) -> dict[str, Any]:
    """Return the settings of the drafter in `path`. ValueError of one line, with the setting `key`,
    file and name, for one that the policy cannot use as it was trained.

    `needs_whole_head` as in `read_draft_settings`.
    """
    folder = Path(path)
    try:
        check_not_of_run(key, path, "hf_drafter")
        check_no_adapter(folder)
        settings = read_draft_settings(
            folder, num_layers=policy.num_layers, needs_whole_head=needs_whole_head
        )
        for name, size in (("hidden_size", policy.hidden_size), ("vocab_size", policy.vocab_size)):
            if settings[name] != size:
                raise ValueError(f"{name}={settings[name]} must be the policy's, {size}")
        if settings.get("tie_word_embeddings") and not policy.tie_word_embeddings:
            raise ValueError("config.json: tie_word_embeddings=True: must be the policy's, False")
        if is_for_sglang and settings[NORM_BEFORE_RESIDUAL]:
            raise ValueError(f"config.json: {NORM_BEFORE_RESIDUAL}=True: must be false for SGLang")
        is_cut = (settings.get("draft_vocab_size") or policy.vocab_size) != policy.vocab_size
        if is_for_sglang and is_cut and not is_of_sglang(folder):
            rule = (
                f"one of {', '.join(ARCHITECTURES.values())}, with {AUX_LAYER_IDS} in eagle_config"
            )
            raise ValueError(f"config.json: architectures: must be {rule}, as SGLang reads them")
        _check_tensors(settings, folder, find_tensors(Path(policy_path)))
    except ValueError as error:
        raise name_setting(f"{key}={str(path)!r}", folder, error) from error
    return settings


def _check_tensors(
    settings: Mapping[str, Any], folder: Path, policy: Mapping[str, StoredTensor]
) -> None:
    """Check the names and shapes, and that what a drafter borrows is that of its policy."""
    is_eagle3 = settings["architectures"] == [ARCHITECTURES["eagle3"]]
    stored: dict[str, StoredTensor] = {}
    for name, tensor in find_tensors(folder).items():
        known = stored.setdefault(own_name(name, is_eagle3), tensor)
        if known is not tensor:
            raise ValueError(f"{tensor.file.name}: {name} is there twice, under two names")
    ids, kept = stored.pop(_IDS, None), stored.pop(_KEPT, None)
    check_not_quantized(settings, stored)
    num_drafted = settings.get("draft_vocab_size") or settings["vocab_size"]
    is_whole = num_drafted == settings["vocab_size"]
    borrowed = {_EMBEDDING: EMBEDDING}
    if is_whole:
        borrowed[_HEAD] = HEAD if HEAD in policy else EMBEDDING
    for name, theirs in borrowed.items():
        own = stored.pop(name, None)
        if own is not None and not has_same_values(own, policy[theirs]):
            raise ValueError(
                f"{own.file.name}: {name} is not {theirs} of the policy, which a drafter must share;"
                " remove it if the drafter was trained with that"
            )
    shapes = draft_shapes(settings)
    if not is_whole:
        shapes[_HEAD] = (num_drafted, settings["hidden_size"])
    if (has_bias := settings.get("bias", settings.get("fusion_bias"))) is False:
        shapes.pop("fc.bias", None)
    optional = set() if has_bias else {"fc.bias"} & {*shapes}
    check_shapes(settings["architectures"][0], shapes, stored, optional)
    if is_whole:
        for name, tensor, byte in ((_IDS, ids, b"\0"), (_KEPT, kept, b"\1")):
            if tensor is not None and read_bytes(tensor).strip(byte):
                raise ValueError(f"{tensor.file.name}: {name} permutes the rows of a whole head")
    elif ids is None:
        raise ValueError(f"lacks {_IDS}, the token ids of its {num_drafted} rows")
    else:
        _check_ids(ids, kept, num_drafted, settings["vocab_size"])


def _check_ids(
    ids: StoredTensor, kept: StoredTensor | None, num_drafted: int, vocab_size: int
) -> None:
    """Check that d2t names the rows of a head by rising token ids, and that t2d agrees with it."""
    kinds = {"I64": "<i8", "I32": "<i4"}
    if ids.dtype not in kinds or ids.shape != (num_drafted,):
        raise ValueError(
            f"{ids.file.name}: {_IDS} is {ids.dtype} {list(ids.shape)}: must be I64 [{num_drafted}]"
        )
    found = np.frombuffer(read_bytes(ids), kinds[ids.dtype]) + np.arange(num_drafted)
    if found[0] < 0 or found[-1] >= vocab_size or (np.diff(found) <= 0).any():
        raise ValueError(
            f"{ids.file.name}: {_IDS} plus the row must be rising token ids, 0 to {vocab_size - 1}"
        )
    if kept is None:
        return
    marks = np.frombuffer(read_bytes(kept), np.uint8)
    fits = kept.dtype == "BOOL" and kept.shape == (vocab_size,)
    if not fits or not np.array_equal(np.flatnonzero(marks), found):
        raise ValueError(
            f"{kept.file.name}: {_KEPT} must be true for the token ids of {_IDS} alone"
        )


def warn_of_unknown_keys(path: str | Path) -> None:
    """Log the keys of a drafter's config.json that nothing here knows."""
    if unknown := sorted({*read_json(Path(path) / "config.json")} - _KNOWN):
        log.warning("%s/config.json: unknown keys have no effect: %s", path, ", ".join(unknown))
