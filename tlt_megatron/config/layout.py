"""Checks that need the number of ranks and the sizes of the model; made before anything expensive starts."""

from __future__ import annotations

import json
from pathlib import Path

from tlt_megatron.config.schema import RunConfig


def check_layout(config: RunConfig, world_size: int) -> None:
    """Refuse a run that cannot start: missing files, ranks that the layout does not divide, sizes that tensor or
    pipeline parallelism cannot cut. ValueError names key, value and what is allowed. Reads only config.json."""
    tp, pp = config.parallel.tensor, config.parallel.pipeline
    if world_size % (tp * pp):
        raise ValueError(
            f"parallel.tensor={tp} x parallel.pipeline={pp} = {tp * pp} does not divide the {world_size} ranks"
        )
    sizes = _read_sizes(config.model.path)
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        if sizes[name] % tp:
            raise ValueError(
                f"parallel.tensor={tp} does not divide {name}={sizes[name]} of {config.model.path}"
            )
    if sizes["num_hidden_layers"] % pp:
        raise ValueError(
            f"parallel.pipeline={pp} does not divide num_hidden_layers={sizes['num_hidden_layers']} of {config.model.path}"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > sizes["max_position_embeddings"]:
        raise ValueError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens} = {longest} exceeds max_position_embeddings="
            f"{sizes['max_position_embeddings']} of {config.model.path}"
        )
    if 0 < config.rollout.kv_cache_tokens < longest:
        raise ValueError(
            f"rollout.kv_cache_tokens={config.rollout.kv_cache_tokens} cannot hold one full sequence of {longest} tokens"
        )
    for name in ("train", "eval"):
        path = getattr(config.data, name)
        if name == "train" and not path:
            raise ValueError("data.train='': must be a .jsonl or .parquet file")
        if path and (not Path(path).is_file() or Path(path).suffix not in (".jsonl", ".parquet")):
            raise ValueError(f"data.{name}={path!r}: must be an existing .jsonl or .parquet file")


def _read_sizes(model_path: str) -> dict[str, int]:
    """The sizes in config.json, with the defaults that transformers gives the supported families."""
    path = Path(model_path) / "config.json"
    if not model_path or not path.is_file():
        raise ValueError(f"model.path={model_path!r}: must be a folder with config.json")
    sizes = json.loads(path.read_text(encoding="utf-8"))
    sizes.setdefault("num_key_value_heads", sizes.get("num_attention_heads"))
    needed = (
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "vocab_size",
        "intermediate_size",
        "max_position_embeddings",
    )
    missing = [name for name in needed if not isinstance(sizes.get(name), int)]
    if missing:
        raise ValueError(f"model.path={model_path!r}: config.json lacks {', '.join(missing)}")
    return sizes
