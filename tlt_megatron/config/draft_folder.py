"""Reads and checks a drafter's config.json (EAGLE / EAGLE-3 layout) without torch.

Called before launch (`preflight.py`) and by `drafter.eagle_folder.load_draft_config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlt_megatron.config.model_shape import rope_config
from tlt_megatron.config.ranges import read_number, read_size, require
from tlt_megatron.saved_files import errors_named, read_json

ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}
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


def read_draft_settings(path: str | Path, *, needs_whole_head: bool = True) -> dict[str, Any]:
    """Return the checked settings with head_dim. ValueError says what is missing or unsupported.

    `needs_whole_head`: False where SGLang runs the drafter and nothing trains it.
    """
    file = Path(path) / "config.json"
    require(file.is_file(), "speculation.drafter", str(path), "a folder with config.json")
    hf = read_json(file)
    found = hf.get("architectures") or ["none"]
    rule = f"one of {', '.join(ARCHITECTURES.values())}"
    is_known = isinstance(found, list) and found[0] in ARCHITECTURES.values()
    require(
        is_known, f"{file}: architectures", found[0] if isinstance(found, list) else found, rule
    )
    needed = [theirs for theirs in SIZES.values() if theirs != "head_dim"]
    missing = [name for name in needed if hf.get(name) is None]
    if missing:
        raise ValueError(f"{file}: lacks {', '.join(missing)}")
    with errors_named(file):
        _check_values(hf)
    num_drafted = hf.get("draft_vocab_size") if needs_whole_head else None
    for name, value, allowed in (
        ("draft_vocab_size", num_drafted, (None, hf["vocab_size"])),
        ("num_hidden_layers", hf.get("num_hidden_layers", 1), (1,)),
        ("norm_output", hf.get("norm_output", False), (False,)),
        ("fc_norm", hf.get("fc_norm"), (None, False)),
    ):
        if value not in allowed:
            raise ValueError(f"{file}: {name}={value!r} is not supported; only {allowed}")
    try:
        rope_config(hf)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return hf


def _check_values(hf: dict[str, Any]) -> None:
    """Check sizes and what EAGLE and this project write besides, and add head_dim."""
    for name in SIZES.values():
        if name not in ("rms_norm_eps", "head_dim"):
            read_size(hf, name)
    hf["head_dim"] = read_size(hf, "head_dim", null=hf["hidden_size"] // hf["num_attention_heads"])
    read_number(hf, "rms_norm_eps", 0.0)
    ids = (hf.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids", [])
    is_ids = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
    require(is_ids, "eagle_aux_hidden_state_layer_ids", ids, "a list of layers")
    if target := (hf.get("tlt_megatron") or {}).get("target"):
        int(target["embedding_hash"], base=16)  # raises for what is no fingerprint


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return SGLang's layers 1, L/2 - 1 and L - 4; in a small model 0, (L - 2)/2 and L - 2."""
    if num_layers < 4:
        raise ValueError(
            f"drafter.algorithm='eagle3': must be eagle or hass for a policy of {num_layers} layers"
            " (eagle3 reads three of at least 4)"
        )
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    return ids if ids[0] < ids[1] < ids[2] else (0, (num_layers - 2) // 2, num_layers - 2)
