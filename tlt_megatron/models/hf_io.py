"""Hugging Face folders: read tensors by name, write a model, and checksum tensors."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tlt_megatron.config.model_folder import ADAPTER_CONFIG
from tlt_megatron.config.model_shape import (
    ROUTER_BIAS,
    ModelConfig,
    load_model_config,
    tensor_shapes,
)
from tlt_megatron.config.own_layer import copied_parts, stored_layers
from tlt_megatron.config.policy_sections import ModelSection
from tlt_megatron.config.weight_files import INDEX_NAME, SINGLE_NAME, find_tensors, read_header
from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.runtime.durable import new_folder, save_tensors

log = logging.getLogger(__name__)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ELEMENTS = 1 << 22  # for a GPU, where each chunk costs kernel launches
_CPU_CHUNK_ELEMENTS = 1 << 18
_CHECKSUM_MODULUS = 1 << 63
_BLOCK_BYTES = 1 << 14  # read for a fingerprint: 771 tensors of a 32B model are 37 MB


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a model of `dtype`: the bias of a router stays in float32, at
    least.
    """
    return wide_dtype(dtype) if name.endswith(ROUTER_BIAS) else dtype


class HfReader:
    """Reads the tensors of a safetensors folder by name. An index, if any, alone names the files.

    Example: `HfReader(path)["model.norm.weight"]`. KeyError names a missing tensor; ValueError
    names a missing or truncated file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tensors = find_tensors(self.path)
        files = {tensor.file for tensor in self._tensors.values()}
        self._handles = {file: safe_open(file, framework="pt") for file in files}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise KeyError(f"{name} is not in {self.path}")
        return self._handles[self._tensors[name].file].get_tensor(name)

    def names(self) -> list[str]:
        """Return all tensor names, sorted."""
        return sorted(self._tensors)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, one at a time."""
        for name in self.names():
            yield name, self[name]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file. ValueError if it is damaged or is none."""
    read_header(file)  # refuses in one line
    return load_file(file)


def policy_tensors(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the policy in a folder, one at a time, in the dtype of an engine."""
    reader = HfReader(folder)
    for name in tensor_shapes(config):
        yield name, reader[name].to(dtype_of(name, dtype))


def fingerprint_weights(path: str | Path) -> str:
    """Return a hash of name, dtype, shape, and the first, middle and last 16 KiB of every tensor of
    a safetensors folder.

    A copy of the folder has the same, and so has another split into files. Training changes it.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(find_tensors(Path(path)).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        last = tensor.end - _BLOCK_BYTES
        with tensor.file.open("rb") as file:
            for start in (tensor.start, (tensor.start + last) // 2, last):
                file.seek(max(start, tensor.start))
                digest.update(file.read(min(_BLOCK_BYTES, tensor.end - tensor.start)))
    return digest.hexdigest()[:16]


def save_hf_model(
    path: Path,
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write `tensors` as sharded safetensors, and copy config and tokenizer files of `source`. A
    layer for MTP of `source` comes along: see `with_own_layer`.

    Holds one shard in memory. Replaces an older folder as a whole: see `new_folder`.
    """
    with new_folder(path) as temporary:
        names = _write_shards(temporary, with_own_layer(tensors, source), dtype, max_shard_bytes)
        _copy_companions(source, temporary, dtype, names)


def with_own_layer(
    tensors: Iterable[tuple[str, Tensor]], source: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors`, and then those of the layers for MTP in `source` that are not among them.

    Copies of embedding and LM head that belong to such a layer get the values in `tensors`.
    """
    if not any(source.glob("*.safetensors")):
        yield from tensors
        return
    reader, policy = HfReader(source), load_model_config(source)
    missing = dict.fromkeys(stored_layers(policy, reader.names()))
    copies = copied_parts(policy, missing)
    for name, tensor in tensors:
        yield name, tensor
        missing.pop(name, None)
        for copy in [copy for copy, original in copies.items() if original == name]:
            yield copy, tensor
            missing.pop(copy, None)
    for name in missing:
        yield name, reader[name]


def save_adapters(
    path: Path, tensors: dict[str, Tensor], model: ModelSection, *, base: str
) -> None:
    """Write adapters in PEFT's format. `base` is the folder of the frozen weights, or its id."""
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": model.lora_targets,
        "bias": "none",
        "inference_mode": True,
    }
    with new_folder(path) as temporary:
        save_tensors(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        (temporary / ADAPTER_CONFIG).write_text(json.dumps(about, indent=2), encoding="utf-8")


def _write_shards(
    path: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_shard_bytes: int
) -> list[str]:
    """Return the names of all tensors."""
    shard: dict[str, Tensor] = {}
    written: list[list[str]] = []  # the names in each file
    total_bytes = 0

    def flush() -> None:
        save_tensors(shard, path / f"part-{len(written)}", metadata={"format": "pt"})
        written.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        tensor = tensor.detach().to("cpu", dtype_of(name, dtype)).contiguous()
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        shard[name] = tensor.clone()
        total_bytes += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(written):
        file = f"model-{number + 1:05d}-of-{len(written):05d}.safetensors"
        if len(written) == 1:
            file = SINGLE_NAME
        (path / f"part-{number}").rename(path / file)
        weight_map |= dict.fromkeys(names, file)
    if len(written) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (path / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return [*weight_map]


def companions(folder: Path) -> list[Path]:
    """Return the files that belong to a model's weights: config, tokenizer, chat template,
    generation config, code that its config names.
    """
    endings = (".json", ".txt", ".model", ".jinja", ".py")
    files = [file for file in folder.iterdir() if file.suffix in endings]
    left_out = (INDEX_NAME, "made_with.json", ADAPTER_CONFIG)
    further = sorted(folder.glob("additional_chat_templates/*.jinja"))
    return [*(file for file in files if file.name not in left_out), *further]


def _copy_companions(source: Path, path: Path, dtype: torch.dtype, names: Collection[str]) -> None:
    for file in companions(source):
        copy = path / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(file, copy)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    if config.get("num_nextn_predict_layers") and not stored_layers(
        load_model_config(source), names
    ):
        log.warning("%s: its files hold no MTP layer: num_nextn_predict_layers becomes 0", source)
        config["num_nextn_predict_layers"] = 0
    config["dtype"] = str(dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


_MIX = 0x2545F4914F6CDD1D  # odd, bits well spread
_OFFSET = 0x632BE5AB


def _as_int64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix_bits(tensor: Tensor) -> Tensor:
    """Return the sum over positions of the mixed bits, int64 modulo 2^64, on the tensor's
    device.
    """
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    step = _CPU_CHUNK_ELEMENTS if bits.is_cpu else _CHUNK_ELEMENTS
    # The factors of the bits of the first chunk.
    first = (torch.arange(min(bits.numel(), step), device=bits.device) * 2 + 1) * _MIX
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), step):
        chunk = bits[start : start + step]
        weights = first[: chunk.numel()]
        if start:
            weights = weights + _as_int64(2 * start * _MIX)
        mixed = chunk.to(torch.int64, copy=True).add_(_OFFSET).mul_(weights)  # int64 wraps around
        total += mixed.bitwise_xor_(mixed >> 31).sum()
    return total


class Checksum:
    """The 63-bit checksum of named tensors, added in any order. It depends on no device.

    Bits are mixed with their position and summed modulo 2^64 where the tensors are. The name
    multiplies the sum. So it detects a changed bit, a shift, and swapped elements or tensors.
    """

    def __init__(self) -> None:
        self._total = 0
        self._sums: dict[torch.device, list[tuple[str, Tensor]]] = {}  # not read back yet

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. On a GPU the host does not wait."""
        self._sums.setdefault(tensor.device, []).append((name, _mix_bits(tensor)))

    def value(self) -> int:
        """Return the checksum of all tensors so far."""
        for named in self._sums.values():
            sums = torch.stack([total for _, total in named]).tolist()
            for (name, _), total in zip(named, sums, strict=True):
                factor = (zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15) | 1
                self._total += (1 + total * _MIX) * factor
        self._sums.clear()
        return self._total % _CHECKSUM_MODULUS


def checksum_tensors(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return the `Checksum` of named tensors."""
    checksum = Checksum()
    for name, tensor in tensors:
        checksum.add(name, tensor)
    return checksum.value()
