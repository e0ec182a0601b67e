"""Reads the safetensors headers of a folder without torch, and checks that files are complete.

A safetensors file is 8 bytes with the length of its header, the header, and the data without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from tlt_megatron.saved_files import open_regular, read_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
_PLAIN_DTYPES = ("F16", "BF16", "F32", "F64")
_PIECE = 1 << 22  # numbers that are compared at once
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
    """Return every tensor of a folder by name. An index, if any, alone names the files.

    ValueError names a file that is missing, truncated or not safetensors, or a tensor that is in
    two files.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _by_index(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder}: must hold .safetensors files (GGUF and .bin must be converted)"
        )
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
    for name, header in headers.items():
        for tensor in header:
            if weight_map.get(tensor, name) != name:
                raise ValueError(
                    f"{index.parent}: {name} holds {tensor}, which {index.name} places in {weight_map[tensor]}:"
                    f" readers disagree on which counts; remove it from {name}"
                )
    return {tensor: stored for header in headers.values() for tensor, stored in header.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file. ValueError if it is not a whole safetensors file."""
    tensors: dict[str, StoredTensor] = {}
    try:
        with open_regular(file) as stream:
            first = stream.read(8)
        if first.startswith(b"version "):
            raise ValueError(f"{file}: is a git-lfs pointer; fetch the file with git lfs pull")
        end = 8 + int.from_bytes(first, "little")  # of the header
        with safe_open(file, framework="np") as opened:  # compares header and size of the file
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                start, dtype, shape = end, part.get_dtype(), tuple(part.get_shape())
                end += _DTYPE_BYTES.get(dtype, 0) * math.prod(shape)
                tensors[name] = StoredTensor(
                    file=file, dtype=dtype, shape=shape, start=start, end=end
                )
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ValueError(f"{file}: is truncated, damaged or not safetensors: {error}") from error
    return tensors


def has_same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors hold the same numbers, in whichever dtypes of PLAIN_DTYPES."""
    if one.shape != other.shape:
        return False
    pairs = zip(_read_values(one), _read_values(other), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def read_bytes(tensor: StoredTensor) -> bytes:
    """Return the bytes of a small tensor."""
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.end - tensor.start)


def _read_values(tensor: StoredTensor) -> Iterator[NDArray[np.floating]]:
    """Yield the values of a stored tensor in pieces of the same number for every dtype."""
    size = _DTYPE_BYTES[tensor.dtype]
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        for start in range(tensor.start, tensor.end, size * _PIECE):
            raw = file.read(min(size * _PIECE, tensor.end - start))
            if tensor.dtype == "BF16":  # the upper half of a float32
                yield (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
            else:
                yield np.frombuffer(raw, f"<f{size}")


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
        if tensor.dtype not in _PLAIN_DTYPES:
            raise ValueError(
                f"{tensor.file.name} holds quantized weights: {name} in {tensor.dtype}; "
                f"use the checkpoint in one of {', '.join(_PLAIN_DTYPES)}"
            )


def name_some(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
