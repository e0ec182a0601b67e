"""Reads the safetensors headers of a folder without torch, and checks that files are complete.

A safetensors file is 8 bytes with the length of its header, the header (JSON: name -> dtype, shape,
offsets), and the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_megatron.config.model_shape import read_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
_PLAIN_DTYPES = ("F16", "BF16", "F32", "F64")
_SCALE_ENDINGS = (
    *("_scale", "_scale_inv", "_scales", ".scales", "_zero_point", ".qweight", ".qzeros", ".g_idx"),
    *(".weight_packed", ".absmax", ".SCB", "_global_scale"),
)
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_NAMED = 3  # names listed in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The location of a tensor: bytes [start, end) of the file."""

    file: Path
    dtype: str  # safetensors' name: F32, BF16, ...
    shape: tuple[int, ...]
    start: int
    end: int


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder by name. An index alone names the files to read.

    ValueError names a file that is missing, truncated or not safetensors, or a tensor that is in
    two files.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _by_index(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: must hold .safetensors files{_other_weights(folder)}")
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in found:
                raise ValueError(
                    f"{folder}: tensor {name} stands in {found[name].file.name} and in {file.name}: "
                    f"remove the files of another model, or add {INDEX_NAME}"
                )
            found[name] = tensor
    return found


def _by_index(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ValueError(f"{index}: must hold weight_map, an object of tensor name -> file name")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(f"{index}: names files that are not there: {name_some(missing)}")
    single = index.parent / SINGLE_NAME
    if single.is_file() and (others := [name for name in names if name != SINGLE_NAME]):
        raise ValueError(
            f"{index.parent}: {SINGLE_NAME} stands beside {INDEX_NAME}, which names {name_some(others)}: "
            f"remove {SINGLE_NAME}, which transformers would read, or the index with its files"
        )
    headers = {name: read_header(index.parent / name) for name in names}
    absent = [tensor for tensor, name in weight_map.items() if tensor not in headers[name]]
    if absent:
        raise ValueError(
            f"{index}: names tensors that their files do not hold: "
            + name_some([f"{tensor} ({weight_map[tensor]})" for tensor in absent])
        )
    return {tensor: headers[name][tensor] for tensor, name in weight_map.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file. ValueError if its size does not match its header."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if first.startswith(b"version "):
                raise ValueError(f"{file}: is a git-lfs pointer; fetch the file with git lfs pull")
            if length + 8 > size or length > _MAX_HEADER_BYTES:
                raise ValueError(
                    f"{file}: is truncated, or not safetensors: {size} bytes, header {length}"
                )
            text = stream.read(length)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, 8 + length, item) for name, item in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: has a header that is not safetensors': {error}") from error
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if end != size:
        problem = "is truncated" if size < end else "has bytes behind its last tensor"
        raise ValueError(f"{file}: {problem}: {size} bytes, its header says {end}")
    return tensors


def _stored(file: Path, data: int, item: Mapping[str, Any]) -> StoredTensor:
    start, end = item["data_offsets"]
    shape, dtype = tuple(item["shape"]), item["dtype"]
    width = _DTYPE_BYTES.get(dtype)
    if width is not None and end - start != width * math.prod(shape):
        raise ValueError(f"{dtype} {list(shape)} takes {end - start} bytes")
    return StoredTensor(file=file, dtype=dtype, shape=shape, start=data + start, end=data + end)


def _other_weights(folder: Path) -> str:
    other = sorted(
        file.name for kind in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(kind)
    )
    return f" ({name_some(other)} must be converted to safetensors)" if other else ""


def check_not_quantized(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError for quantized weights: training needs them without scales."""
    for key in ("quantization_config", "compression_config"):
        quantization = settings.get(key)
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise ValueError(
                f"config.json {key} says that the weights are quantized (quant_method={method!r}); "
                "use the checkpoint in float32, float16 or bfloat16"
            )
    for name, tensor in tensors.items():
        if tensor.dtype not in _PLAIN_DTYPES or name.endswith(_SCALE_ENDINGS):
            raise ValueError(
                f"{tensor.file.name} holds quantized weights: {name} in {tensor.dtype}; "
                f"use the checkpoint in one of {', '.join(_PLAIN_DTYPES)}"
            )


def name_some(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
