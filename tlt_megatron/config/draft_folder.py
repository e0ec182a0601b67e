"""Reads and checks a drafter's config.json (EAGLE / EAGLE-3 layout) without torch.

Called before launch (`preflight.py`) and by `drafter.eagle_folder.load_draft_config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlt_megatron.config.model_shape import read_json, rope_config
from tlt_megatron.config.ranges import require

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
    found = (hf.get("architectures") or ["none"])[0]
    rule = f"one of {', '.join(ARCHITECTURES.values())}"
    require(found in ARCHITECTURES.values(), f"{file}: architectures", found, rule)
    needed = [theirs for theirs in SIZES.values() if theirs != "head_dim"]
    missing = [name for name in needed if hf.get(name) is None]
    if missing:
        raise ValueError(f"{file}: lacks {', '.join(missing)}")
    if hf.get("head_dim") is None:
        hf["head_dim"] = hf["hidden_size"] // hf["num_attention_heads"]
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


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return SGLang's layers 1, L/2 - 1 and L - 4; in a small model 0, (L - 2)/2 and L - 2."""
    if num_layers < 4:
        raise ValueError(
            f"drafter.algorithm='eagle3': must be eagle or hass for a policy of {num_layers} layers"
            " (eagle3 reads three of at least 4)"
        )
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    return ids if ids[0] < ids[1] < ids[2] else (0, (num_layers - 2) // 2, num_layers - 2)
