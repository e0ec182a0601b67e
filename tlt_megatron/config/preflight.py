"""Checks policy, drafter, tokenizer, prompts and a user's files before torch is imported.

The launcher calls it, so that a mistake is reported at once and in one line.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tlt_megatron.config.draft_folder import check_drafter, default_aux_layer_ids
from tlt_megatron.config.extensions import (
    REGISTRY,
    UNSAFE_PYTHON,
    check_extension_file,
    named_code,
)
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.model_shape import ModelConfig
from tlt_megatron.config.own_layer import OWN, check_own_layer
from tlt_megatron.config.same_tokenizer import tokenizer_difference
from tlt_megatron.config.schema import RunConfig


def check_files(config: RunConfig) -> None:
    """Raise a ValueError of one line for what a run would hit later. Loads no weights."""
    policy = check_model("model.path", config.model.path)
    if config.has_critic and config.critic.path:
        _check_vocabulary("critic.path", config.critic.path, policy)
    if config.has_reference and config.reference.path:
        _check_reference(config, policy)
    if config.speculation.enabled and config.speculation.is_learned:
        if config.speculation.drafter == OWN:
            check_own(config, policy)
        elif config.speculation.drafter:
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


def foreign_code(config: RunConfig) -> list[tuple[str, str]]:
    """Return every setting that names code outside of the package, and the setting with its value.

    Built-in names are none.
    """
    found = [
        (setting, f"{setting}={spec!r}")
        for setting, spec in named_code(config)
        if spec not in REGISTRY[setting].built_in or spec == UNSAFE_PYTHON
    ]
    if config.rollout.engine == "sglang" and config.sglang.engine_args:  # such as trust_remote_code
        found.append(("sglang.engine_args", f"sglang.engine_args={config.sglang.engine_args!r}"))
    return found


def check_trusted(config: RunConfig, run: str, named: Collection[str], key: str = "") -> None:
    """Raise ValueError if a setting of `config`, read from the run folder `run`, is `foreign_code`.

    `named` are the settings that the command line has given again. `key` is the one setting that
    will be used; "" stands for all of them.
    """
    foreign = [
        text
        for setting, text in foreign_code(config)
        if key in ("", setting)
        and not any(f"{setting}.".startswith(f"{given}.") for given in named)
    ]
    if foreign:
        again = "" if key else ", or name them again on the command line"
        raise ValueError(
            f"{run}/config.yaml names code outside of the package: {', '.join(foreign)}."
            f" If you trust it, give --trust-run{again}"
        )


def _check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a built-in tracker, named like its package, that is not installed."""
    for name in names:
        if name in REGISTRY["logging.trackers"].built_in and find_spec(name) is None:
            raise ValueError(
                f"logging.trackers={name}: the package {name} is not installed: install it, or set other trackers"
            )


def _check_vocabulary(key: str, path: str, policy: ModelConfig) -> ModelConfig:
    model = check_model(key, path, needs_tokenizer=key == "reference.path")
    if model.vocab_size < policy.vocab_size:
        raise ValueError(
            f"{key}={path!r}: vocab_size={model.vocab_size} must be >= {policy.vocab_size}, the policy's"
        )
    return model


def _check_reference(config: RunConfig, policy: ModelConfig) -> None:
    path, refresh_steps = config.reference.path, config.reference.refresh_steps
    model = _check_vocabulary("reference.path", path, policy)
    if problem := tokenizer_difference(Path(config.model.path), Path(path)):
        raise ValueError(f"reference.path={path!r}: must have the policy's tokenizer: {problem}")
    same = replace(model, max_position_embeddings=policy.max_position_embeddings)
    config.reference.require(
        not refresh_steps or same == policy,
        "refresh_steps",
        f"0, because config.json of {path} is not the policy's",
    )


def check_own(config: RunConfig, policy: ModelConfig, *, needs_weights: bool = True) -> None:
    """Raise ValueError if the checkpoint's own layer cannot be the drafter. See
    `check_own_layer`.
    """
    config.drafter.require(
        config.drafter.algorithm != "eagle3",
        "algorithm",
        "eagle or hass where speculation.drafter='own'",
    )
    check_own_layer(config.model.path, policy, needs_weights=needs_weights)


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
