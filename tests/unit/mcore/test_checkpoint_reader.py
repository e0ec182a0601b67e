"""Nothing in a checkpoint runs when it is read, whatever a crafted one asks for."""

from __future__ import annotations

import enum
import functools
import io
import os
import pathlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from tlt_megatron.mcore.checkpoint_reader import read_common, read_metadata


class Call:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.function, self.arguments


def test_what_torch_writes_is_read_for_every_dtype(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool)
    state = {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in dtypes}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    metadata = read_metadata(tmp_path)
    assert metadata == pickle.loads((tmp_path / ".metadata").read_bytes())
    assert metadata.state_dict_metadata["torch.bfloat16"].properties.dtype == torch.bfloat16


class OlderPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj: object) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_what_the_first_releases_of_python_3_11_write_is_read(tmp_path: Path) -> None:
    save({"weight": torch.zeros(2, 3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    metadata = read_metadata(tmp_path)
    written = io.BytesIO()
    OlderPickler(written).dump(metadata)
    assert b"getattr" in written.getvalue()
    (tmp_path / ".metadata").write_bytes(written.getvalue())
    assert read_metadata(tmp_path) == metadata


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "_missing_"),
        (Metadata, "__init__"),
        (TensorProperties, "create_from_tensor"),
    ],
)
def test_getattr_gives_members_of_enumerations_alone(tmp_path: Path, of: object, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(getattr, of, name)))
    with pytest.raises(ValueError, match=f"{name} is not a member of an enumeration"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    "function", [os.system, os.mkdir, eval, functools.partial, torch.load, pathlib.Path.touch]
)
def test_a_crafted_index_and_crafted_plain_values_run_nothing(
    tmp_path: Path, function: Callable[..., Any]
) -> None:
    trace = tmp_path / "trace"
    for hidden in (Call(function, str(trace)), Metadata({}, Call(os.mkdir, str(trace)), {})):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(hidden))
        torch.save({"identity": hidden}, tmp_path / "common.pt")
        with pytest.raises(ValueError, match=r"\.metadata is not loaded: .* is not a class of"):
            read_metadata(tmp_path)
        with pytest.raises(ValueError, match=r"common\.pt is not loaded: ") as refused:
            read_common(tmp_path)
        assert "weights_only" not in str(refused.value)  # torch advises to run what is in it
    assert not trace.exists()


def test_a_shard_is_a_file_of_the_folder(tmp_path: Path) -> None:
    place = _StorageInfo(relative_path="../secret", offset=0, length=1)
    metadata = Metadata({}, storage_data={MetadataIndex("weight"): place})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"'\.\./secret' is not a file name"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80", b"junk", pickle.dumps({})])
def test_a_damaged_index_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is not loaded"):
        read_metadata(tmp_path)
