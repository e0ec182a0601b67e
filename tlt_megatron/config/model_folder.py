"""The one check of a model's folder, before torch is imported: `check_model`. Every command, class
and setting that loads a model calls it first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from tlt_megatron.config.model_shape import (
    FAMILIES,
    ModelConfig,
    load_model_config,
    read_eos_token_ids,
    read_json,
    tensor_shapes,
)
from tlt_megatron.config.weight_files import (
    StoredTensor,
    check_not_quantized,
    find_tensors,
    has_same_values,
    name_some,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Each suffices: the tokenizer's files of a folder.
_TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)
_DERIVED_TENSORS = (".rotary_emb.inv_freq",)  # in old Llama checkpoints; never read, but computed
# PEFT's files: transformers loads such an adapter into the model beside it, and this trainer none.
ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


def check_model(
    key: str, path: str | Path, *, needs_weights: bool = True, needs_tokenizer: bool = True
) -> ModelConfig:
    """Return the config of the model in `path`. ValueError of one line, with the setting `key`,
    file and name, for one that cannot be loaded or that would compute something else.

    Without `needs_weights` a folder without any weights passes. Of the weights it reads the headers
    alone, but for a tied embedding beside another LM head: it compares these.
    """
    folder = Path(path)
    try:
        if str(path):
            check_no_adapter(folder)
        config = load_model_config(path, key)
        settings = read_json(folder / "config.json")
        check_not_quantized(settings, {})
        read_eos_token_ids(folder, config.vocab_size)
        if needs_weights or any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
            tensors, shapes = find_tensors(folder), tensor_shapes(config)
            check_not_quantized(settings, tensors)
            if prefix := mtp_prefix(config):  # `own_layer.py` checks these
                tensors = {n: t for n, t in tensors.items() if not n.startswith(prefix)}
            check_shapes(config.model_type, shapes, tensors, {HEAD} - {*shapes})
            _check_tied_head(config, tensors)
        if needs_tokenizer:
            _check_tokenizer_files(folder)
    except ValueError as error:
        raise name_setting(f"{key}={str(path)!r}", folder, error) from error
    return config


def mtp_prefix(config: ModelConfig) -> str:
    """Return the beginning of the names of layers that predict a further token; "": the family has
    none.
    """
    names = FAMILIES[config.model_type].mtp
    return names.prefix.format(num_layers=config.num_layers) if names else ""


def name_setting(setting: str, folder: Path, error: ValueError) -> ValueError:
    """Return the error with the setting's name before it, without the folder, which that holds."""
    text = str(error).removeprefix(f"{setting}: ")
    return ValueError(f"{setting}: {text.removeprefix(f'{folder}/').removeprefix(f'{folder}: ')}")


def check_no_adapter(folder: Path) -> None:
    """Raise ValueError for PEFT's files in a folder."""
    found = [name for name in _ADAPTER_FILES if (folder / name).is_file()]
    if found:
        raise ValueError(
            f"{found[0]} is there: an adapter is not applied. Merge it into the model (merge_and_unload of PEFT),"
            f" or remove {' and '.join(found)}"
        )


def check_shapes(
    kind: str,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, StoredTensor],
    optional: Collection[str] = (),
) -> None:
    """Check that the files hold exactly the tensors `shapes` of a model of this `kind`, in which
    those of `optional` may be missing. An extra bias would be ignored.
    """
    extra = [
        f"{name} ({tensor.file.name})"
        for name, tensor in tensors.items()
        if name not in shapes and name not in optional and not name.endswith(_DERIVED_TENSORS)
    ]
    missing = [name for name in shapes if name not in tensors and name not in optional]
    other = f"tensors that a {kind} of this config.json does not have: {name_some(extra)}"
    if missing:
        also = f", and hold {other}" if extra else ""
        raise ValueError(f"its files lack {name_some(missing)}{also}")
    if extra:
        raise ValueError(f"its files hold {other}")
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            found = list(tensors[name].shape)
            raise ValueError(f"{name} has shape {found}, config.json makes it {list(shape)}")


def _check_tied_head(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    if not config.tie_word_embeddings or HEAD not in tensors:
        return
    if not has_same_values(tensors[HEAD], tensors[EMBEDDING]):
        raise ValueError(
            f"config.json tie_word_embeddings=true, but {HEAD} ({tensors[HEAD].file.name}) is not {EMBEDDING}:"
            f" set it to false, or remove {HEAD}"
        )


def _check_tokenizer_files(folder: Path) -> None:
    """Check that a tokenizer is there. `data/tokenizer.py` compares it with the vocabulary."""
    if not any(all((folder / name).is_file() for name in files) for files in _TOKENIZERS):
        allowed = ", ".join(" with ".join(files) for files in _TOKENIZERS)
        raise ValueError(f"must hold a tokenizer, one of {allowed}")
