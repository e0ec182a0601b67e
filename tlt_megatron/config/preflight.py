"""Checks policy, drafter, tokenizer, prompts and a user's files before torch is imported.

The launcher calls it, so that a mistake is reported at once and in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from tlt_megatron.config.draft_folder import check_drafter, default_aux_layer_ids
from tlt_megatron.config.extensions import REGISTRY, check_extension_file
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.model_shape import ModelConfig
from tlt_megatron.config.schema import RunConfig


def check_files(config: RunConfig) -> None:
    """Raise a ValueError of one line for what a run would hit later. Loads no weights."""
    policy = check_model("model.path", config.model.path)
    if config.has_critic and config.critic.path:
        _check_critic(config.critic.path, policy)
    if config.speculation.enabled and config.speculation.is_learned:
        if config.speculation.drafter:
            _check_drafter(config, policy)
        elif config.drafter.algorithm == "eagle3":
            default_aux_layer_ids(policy.num_layers)
    _check_prompts("data.train", config.data.train)
    for path in config.data.eval_files.values():
        _check_prompts("data.eval", path)


def check_code(config: RunConfig) -> None:
    """Raise a ValueError of one line for a named function or tracker that is not there.

    It needs no model, so that it can come before one is fetched.
    """
    for key, spec in named_code(config):
        check_extension_file(key, spec)
    _check_trackers(config.logging.trackers)


def named_code(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield every setting that names a function or a class, with a name that it has."""
    for key in REGISTRY:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if key == "reward.function":
            value = config.reward.weights
        for spec in filter(None, [value] if isinstance(value, str) else value):
            yield key, spec


def _check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a built-in tracker, named like its package, that is not installed."""
    for name in names:
        if name in REGISTRY["logging.trackers"].built_in and find_spec(name) is None:
            raise ValueError(
                f"logging.trackers={name}: the package {name} is not installed: install it, or set other trackers"
            )


def _check_critic(path: str, policy: ModelConfig) -> None:
    found = check_model("critic.path", path, needs_tokenizer=False).vocab_size
    if found < policy.vocab_size:
        raise ValueError(
            f"critic.path={path!r}: vocab_size={found} must be >= {policy.vocab_size}, the policy's"
        )


def _check_drafter(config: RunConfig, policy: ModelConfig) -> None:
    is_for_sglang = config.rollout.engine == "sglang"
    check_drafter(
        "speculation.drafter",
        config.speculation.drafter,
        policy,
        config.model.path,
        needs_whole_head=not is_for_sglang or config.spot.enabled,
        is_for_sglang=is_for_sglang,
    )


def _check_prompts(key: str, path: str) -> None:
    """Check that the file is there. `data/prompts.py` refuses bad rows before a model is built."""
    if not path or Path(path).suffix not in (".jsonl", ".parquet") or not Path(path).is_file():
        raise ValueError(f"{key}={path!r}: must be an existing .jsonl or .parquet file")
