"""Checks policy, drafter, tokenizer, prompts and a user's files before torch is imported.

The launcher calls it, so that a mistake is reported at once and in one line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tlt_megatron.config.draft_folder import default_aux_layer_ids, read_draft_settings
from tlt_megatron.config.extensions import REGISTRY, check_extension_file
from tlt_megatron.config.model_shape import (
    ModelConfig,
    load_model_config,
    read_eos_token_ids,
    tensor_shapes,
)
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.config.weight_files import (
    StoredTensor,
    check_not_quantized,
    find_tensors,
    name_some,
)
from tlt_megatron.saved_files import read_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_DERIVED_TENSORS = (".rotary_emb.inv_freq",)  # in old Llama checkpoints; never read, but computed


def check_files(config: RunConfig) -> None:
    """Raise a ValueError of one line for what a run would hit later. Reads no weights."""
    policy = check_model("model.path", config.model.path)
    _check_tokenizer(config.model.path)
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


def foreign_code(config: RunConfig) -> list[tuple[str, str]]:
    """Return every setting that names code outside of the package, and the setting with its value.

    Built-in names are none.
    """
    found = [
        (setting, f"{setting}={spec!r}")
        for setting, spec in named_code(config)
        if spec not in REGISTRY[setting].built_in
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


def _check_critic(path: str, policy: ModelConfig) -> None:
    found = check_model("critic.path", path).vocab_size
    if found < policy.vocab_size:
        raise ValueError(
            f"critic.path={path!r}: vocab_size={found} must be >= {policy.vocab_size}, the policy's"
        )


def check_model(key: str, path: str) -> ModelConfig:
    config, folder = load_model_config(path, key), Path(path)
    try:
        tensors = find_tensors(folder)
        check_not_quantized(read_json(folder / "config.json"), tensors)
        _check_shapes(config, tensors)
        read_eos_token_ids(folder, config.vocab_size)
    except ValueError as error:
        raise _refusal(f"{key}={path!r}", folder, error) from error
    return config


def _refusal(setting: str, folder: Path, error: ValueError) -> ValueError:
    """Return the error with the setting's name before it, without the folder, which that holds."""
    text = str(error).removeprefix(f"{folder}/").removeprefix(f"{folder}: ")
    return ValueError(f"{setting}: {text}")


def _check_shapes(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Check that the files hold exactly this architecture. An extra bias would be ignored."""
    shapes = tensor_shapes(config)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ValueError(f"its files lack {name_some(missing)}")
    known = {*shapes, "lm_head.weight"}  # loading compares a tied head (`mcore/weight_map.py`)
    # GLM's last layer predicts the token after the next one; neither loaded nor exported.
    ignored = f"model.layers.{config.num_layers}." if config.model_type == "glm4_moe" else "-"
    extra = [
        name
        for name in tensors
        if name not in known
        and not name.endswith(_DERIVED_TENSORS)
        and not name.startswith(ignored)
    ]
    if extra:
        raise ValueError(
            f"its files hold tensors that a {config.model_type} of this config.json does not have: {name_some(extra)}"
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            found = list(tensors[name].shape)
            raise ValueError(f"{name} has shape {found}, config.json makes it {list(shape)}")


def _check_tokenizer(path: str) -> None:
    """Check that a tokenizer is there. `data/tokenizer.py` compares it with the vocabulary."""
    if not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"model.path={path!r}: must hold a tokenizer, one of {', '.join(_TOKENIZER_FILES)}"
        )


def _check_drafter(config: RunConfig, policy: ModelConfig) -> None:
    folder = Path(config.speculation.drafter)
    needs_whole_head = config.rollout.engine == "embedded" or config.spot.enabled
    settings = read_draft_settings(folder, needs_whole_head=needs_whole_head)
    try:
        check_not_quantized(settings, find_tensors(folder))
        for name, size in (("hidden_size", policy.hidden_size), ("vocab_size", policy.vocab_size)):
            if settings[name] != size:
                raise ValueError(f"{name}={settings[name]} must be the policy's, {size}")
    except ValueError as error:
        raise _refusal(f"speculation.drafter={str(folder)!r}", folder, error) from error


def _check_prompts(key: str, path: str) -> None:
    """Check that the file is there. `data/prompts.py` refuses bad rows before a model is built."""
    if not path or Path(path).suffix not in (".jsonl", ".parquet") or not Path(path).is_file():
        raise ValueError(f"{key}={path!r}: must be an existing .jsonl or .parquet file")
