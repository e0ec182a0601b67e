"""Reads a torch_dist checkpoint without running anything that is in it. Used by
megatron_checkpoint.py.

Three kinds of its files are pickles, which can call any function when they are loaded. Our
unpickler reads `.metadata` and accepts only the classes that torch.distributed.checkpoint writes.
`common.pt` and the tensors are read by torch.load with weights_only. Byte entries (the extra state
of Transformer Engine's layers) are rejected: no load needs one.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tlt_megatron.saved_files import one_line, parse_torch, read_bytes

COMMON_FILE = "common.pt"
# The classes that torch 2.11 to 2.14 pickle into `.metadata`. Only Python 3.13 names pathlib's
# classes pathlib._local.
_ALLOWED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": (  # Megatron's own save keeps its plans there
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}


def _enum_member(owner: type, name: str) -> Enum:
    """Return what Python 3.11.0 to 3.11.3 pickle as getattr(owner, name): the member of an
    enumeration.
    """
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"{name} is not a member of an enumeration")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not a class of a checkpoint's index")


def read_metadata(path: Path) -> Metadata:
    """Return the index in the folder `path`. ValueError if it is damaged or names a class that is
    not allowed.
    """
    file = path / ".metadata"
    try:
        metadata = _MetadataUnpickler(io.BytesIO(read_bytes(file))).load()
        _check_index(metadata)
        # Shards are files of the folder itself.
        names = {info.relative_path for info in metadata.storage_data.values()}
        strange = sorted(name for name in names if PurePath(name).name != name)
    except Exception as error:  # damaged bytes make an unpickler raise any type
        raise ValueError(f"{file} is not loaded: {one_line(error)}") from error
    if strange:
        raise ValueError(f"{file} is not loaded: {strange[0]!r} is not a file name")
    return metadata


def _check_index(metadata: Metadata) -> None:
    """Raise an error for an index with values that no save writes."""
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, BytesStorageMetadata):
            continue
        sizes = [about.size]  # type: ignore[union-attr]
        for chunk in about.chunks:
            sizes += (chunk.offsets, chunk.sizes)
        is_whole = all(
            len(size) == len(about.size) and all(type(n) is int and 0 <= n < 2**48 for n in size)
            for size in sizes
        )
        if not (is_whole and isinstance(about.properties.dtype, torch.dtype)):
            raise ValueError(f"tensor {name} has no sizes or no dtype")
    for index, info in metadata.storage_data.items():
        places = (info.offset, info.length)
        if not all(type(place) is int and 0 <= place < 2**63 for place in places):
            raise ValueError(f"tensor {index.fqn} lies at {places}: must be bytes of a file")


class MetadataReader(FileSystemReader):
    """Torch's reader of shards, with our reader of the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """See `read_metadata` above."""
        return read_metadata(Path(self.path))


def read_common(path: Path) -> dict[str, Any]:
    """Return the plain values in `common.pt`. ValueError if it is damaged or holds anything
    else.
    """
    file = path / COMMON_FILE
    try:
        common = parse_torch(file, read_bytes(file))
    except OSError as error:
        raise ValueError(f"{file} is not loaded: {error}") from error
    if not isinstance(common, dict):
        raise ValueError(f"{file} is not loaded: must hold a dict, not a {type(common).__name__}")
    return common


def load_state(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the plain values of the checkpoint `path`, and the tensors that Megatron's sharded
    `state` asks for.

    These are the steps of `megatron.core.dist_checkpointing.load`, whose own readers unpickle any
    class.
    """
    from megatron.core.dist_checkpointing.dict_utils import merge
    from megatron.core.dist_checkpointing.mapping import apply_factory_merges
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
    from megatron.core.dist_checkpointing.utils import (
        extract_sharded_base,
        force_all_tensors_to_non_fp8,
    )

    force_all_tensors_to_non_fp8(state)
    state, local, factories = load_preprocess(state)
    sharded, _ = extract_sharded_base(state)
    # Without plain values megatron-core 0.19 writes no such file.
    loaded: Any = read_common(path) if (path / COMMON_FILE).is_file() else {}
    for part in (local, _load_shards(sharded, path)):
        merge(loaded, part)
    apply_factory_merges(loaded, factories)  # pyright: ignore[reportArgumentType]  # a list in a list
    return loaded


def _load_shards(sharded: Any, path: Path) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    class TensorPlanner(torch_dist.MCoreLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            assert self.metadata is not None
            known = self.metadata.state_dict_metadata
            for name in self.state_dict:
                if not isinstance(known.get(name), TensorStorageMetadata):
                    raise ValueError(f"the checkpoint has no tensor {name}")
            return super().create_local_plan()

    shards, flat_mapping, rename_mapping = torch_dist._replace_state_dict_keys_with_sharded_keys(
        sharded
    )
    # Megatron's annotations know lists of ShardedTensors only.
    expected: Any = [part for parts in shards.values() for part in parts]
    tensors: Any = torch_dist.mcore_to_pyt_state_dict(shards, True)
    planner = TensorPlanner(shapes_validation_sharded_tensors=expected)
    load(tensors, storage_reader=MetadataReader(path), planner=planner)
    loaded: Any = {k: torch_dist._unwrap_pyt_sharded_tensor(t) for k, t in tensors.items()}
    loaded = torch_dist._replace_sharded_keys_with_state_dict_keys(
        loaded, flat_mapping, rename_mapping
    )
    torch_dist._restore_dict_types(loaded, sharded)
    return loaded
