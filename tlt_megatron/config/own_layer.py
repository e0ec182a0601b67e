"""The layer of a checkpoint that predicts a further token (multi-token prediction, MTP): names and
shapes of its tensors.

`speculation.drafter=own` makes it the drafter. Embedding and LM head are the policy's; some
checkpoints store copies of both beside the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tlt_megatron.config.model_folder import EMBEDDING, HEAD, check_shapes, mtp_prefix
from tlt_megatron.config.model_shape import FAMILIES, ModelConfig, tensor_shapes
from tlt_megatron.config.weight_files import StoredTensor, find_tensors
from tlt_megatron.saved_files import read_json

OWN = "own"  # the value of speculation.drafter
_LAYER = "layers.0."  # of a drafter's names
_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}


def own_names(policy: ModelConfig) -> dict[str, str]:
    """Return the names of the layer in a checkpoint, by a drafter's names."""
    names = FAMILIES[policy.model_type].mtp
    assert names is not None
    prefix = mtp_prefix(policy) + names.first
    found = {
        "enorm.weight": names.embedding_norm,
        "hnorm.weight": names.hidden_norm,
        "fc.weight": names.fusion,
        "norm.weight": names.final_norm,
    }
    found = {ours: f"{prefix}{theirs}.weight" for ours, theirs in found.items()}
    return found | {_LAYER + name: prefix + name for name in _layer_shapes(policy)}


def own_shapes(policy: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the layer, by a drafter's names."""
    hidden = policy.hidden_size
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("enorm.weight", "hnorm.weight", "norm.weight"), (hidden,)
    )
    shapes["fc.weight"] = (hidden, 2 * hidden)
    return shapes | {_LAYER + name: shape for name, shape in _layer_shapes(policy).items()}


def _layer_shapes(policy: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the decoder layer's shapes: it has the form of the policy's last layer."""
    last = f"model.layers.{policy.num_layers - 1}."
    shapes = tensor_shapes(policy)
    return {name.removeprefix(last): shapes[name] for name in shapes if name.startswith(last)}


def is_frozen(name: str) -> bool:
    """Return whether training leaves a tensor as it is: router and routed experts."""
    return ".mlp.gate." in name or ".mlp.experts." in name


def stored_layers(policy: ModelConfig, names: Iterable[str]) -> list[str]:
    """Return those of a checkpoint's tensor names that belong to layers of this kind."""
    prefix = mtp_prefix(policy)
    return [name for name in names if prefix and name.startswith(prefix)]


def note_own_layer(path: str | Path, policy: ModelConfig) -> str | None:
    """Return a line that tells a user about the checkpoint's layer, or None if it lacks one.

    config.json says so where there are no weights.
    """
    folder = Path(path)
    count = read_json(folder / "config.json").get("num_nextn_predict_layers")
    if not mtp_prefix(policy) or not count:
        return None
    if any(folder.glob("*.safetensors")) and not stored_layers(policy, find_tensors(folder)):
        return None
    return (
        "the checkpoint has an MTP layer, a trained drafter: speculation.drafter=own starts from it"
    )


def copied_parts(policy: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """Return the copies of embedding and LM head among a checkpoint's names, and what each is a
    copy of.
    """
    copies = _COPIES | (
        {"shared_head.head.weight": EMBEDDING} if policy.tie_word_embeddings else {}
    )
    return {
        name: source
        for name in stored_layers(policy, names)
        for ending, source in copies.items()
        if name.endswith(f".{ending}")
    }


def check_own_layer(
    path: str | Path,
    policy: ModelConfig,
    key: str = "speculation.drafter",
    *,
    needs_weights: bool = True,
) -> None:
    """Raise ValueError of one line, with the setting `key`, if the checkpoint `path` has no layer
    for a drafter. Without `needs_weights`, config.json suffices where there are no weights.
    """
    folder, key = Path(path), f"{key}={OWN!r}"
    has_weights = needs_weights or any(folder.glob("*.safetensors"))
    if not has_weights and note_own_layer(path, policy):
        return
    tensors = find_tensors(folder) if has_weights else {}
    stored: Mapping[str, StoredTensor] = {n: tensors[n] for n in stored_layers(policy, tensors)}
    if not stored:
        families = ", ".join(name for name, family in FAMILIES.items() if family.mtp)
        raise ValueError(
            f"{key}: the checkpoint {folder} has no MTP layer (it is a {policy.model_type};"
            f" {families} may have one): train a drafter by tlt train-drafter, or set"
            " spot.enabled=true without speculation.drafter"
        )
    count = read_json(folder / "config.json").get("num_nextn_predict_layers", 1)
    if count != 1:
        raise ValueError(f"{key}: {folder}: num_nextn_predict_layers={count}: must be 1")
    copies = copied_parts(policy, tensors)
    shapes = {theirs: own_shapes(policy)[ours] for ours, theirs in own_names(policy).items()}
    try:
        own = {name: tensor for name, tensor in stored.items() if name not in copies}
        check_shapes("layer for MTP", shapes, own)
    except ValueError as error:
        raise ValueError(f"{key}: {folder}: {error}") from error
