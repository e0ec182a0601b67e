"""Reads the policy's weights out of a torch_dist checkpoint of any layout, and writes one, tensor
by tensor and without a model.

Megatron stores whole tensors in chunks, one per shard. Equal layers lie in one tensor with an axis
of layers in front, and the experts of a layer in one with an axis of experts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, SavePlan, save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tlt_megatron.mcore import cpu
from tlt_megatron.mcore.checkpoint_reader import read_metadata
from tlt_megatron.mcore.megatron_checkpoint import ShardWriter, first_failure, write_common
from tlt_megatron.mcore.weight_map import (
    EMBEDDING_ROW,
    FINAL_NORM_ROW,
    Row,
    expert_rows,
    hf_shapes,
    layer_rows,
    lm_head_row,
    merge,
    num_local_experts,
    shard_shape,
    split,
)
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.hf_io import HfReader, dtype_of
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.saved_files import errors_named, open_regular, parse_torch

_LAYER = re.compile(r"(?<=^decoder\.layers\.)(\d+)\.")
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)local_experts\.(\d+)\.")


def iter_stored_weights(path: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the policy in the checkpoint `path` under its Hugging Face name, in
    layer order.

    Holds one tensor in memory; of a parameter with several Hugging Face tensors, all of them.
    ValueError for one that is missing, damaged or of another shape than `config` says, and at the
    end for weights that `config` does not have.
    """
    stored = _StoredTensors(path)
    for row in _rows(config):
        tensors = merge(row, [stored.read(row)], config)
        for name, tensor, shape in zip(row.hf_names, tensors, hf_shapes(row, config), strict=True):
            if tensor.shape != shape:
                raise ValueError(
                    f"checkpoint {path}: {name} has shape {tuple(tensor.shape)}: must be {shape}"
                )
            yield name, tensor
    if stored.num_left:
        raise ValueError(f"checkpoint {path}: holds weights that the model does not have")


def write_stored_weights(
    path: Path,
    config: ModelConfig,
    source: HfReader,
    dtype: str,
    on_tensor: Callable[[], None] = lambda: None,
) -> None:
    """Write the policy in `source` as a torch_dist checkpoint of one file into the empty folder
    `path`, without an optimizer.

    Holds one parameter in memory. `on_tensor` is called for each tensor of `source`. ValueError for
    weights that are not finite.
    """
    cpu.install()
    try:
        planner = _WeightPlanner(config, source, getattr(torch, dtype), on_tensor)
        save({}, storage_writer=ShardWriter(path, sync_files=True), planner=planner, no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise cause if isinstance(cause, ValueError) else OSError(first_failure(error)) from None
    write_common(path, {"identity": {"model.dtype": dtype}})


class _WeightPlanner(DefaultSavePlanner):
    """Names the parameters as Megatron stores those of a model of Transformer Engine, and reads
    each when it is written.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: HfReader,
        dtype: torch.dtype,
        on_tensor: Callable[[], None],
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._config, self._source, self._dtype = config, source, dtype
        self._on_tensor = on_tensor
        self._rows: dict[MetadataIndex, Row] = {}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(row) for row in _rows(self._config)])
        return self.plan

    def _item(self, row: Row) -> WriteItem:
        """Return where a parameter lies in a tensor that has one axis in front at most."""
        experts, shape = self._config.experts, shard_shape(row, self._config, 1)
        places = list(_places(row.mcore_names[0 if row.is_expert else -1]))
        # Megatron stacks the layers of a model without experts.
        name, place = places[-1 if experts is None else 0]
        num_stacked = self._config.num_layers if experts is None else experts.num_experts
        offsets = torch.Size((*place, *(0 for _ in shape)))
        about = TensorWriteData(
            chunk=ChunkStorageMetadata(
                offsets=offsets, sizes=torch.Size((*(1 for _ in place), *shape))
            ),
            properties=TensorProperties(dtype=dtype_of(row.hf_names[0], self._dtype)),
            size=torch.Size((*(num_stacked for _ in place), *shape)),
        )
        index = MetadataIndex(name, offsets)
        self._rows[index] = row
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=about)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        row = self._rows[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        tensors = []
        for name in row.hf_names:
            tensors.append(self._source[name])
            self._on_tensor()
        whole = split(row, tensors, self._config, 0, 1)
        if not whole.isfinite().all():
            raise ValueError(f"{self._source.path}: {', '.join(row.hf_names)}: not finite")
        assert write_item.tensor_data is not None
        sizes = write_item.tensor_data.chunk.sizes
        return whole.to(dtype_of(row.hf_names[0], self._dtype)).reshape(sizes).contiguous()


def _rows(config: ModelConfig) -> Iterator[Row]:
    yield EMBEDDING_ROW
    for layer in range(config.num_layers):
        yield from layer_rows(config, layer, layer)
        for expert in range(num_local_experts(config, layer, SINGLE)):
            yield from expert_rows(config, layer, layer, expert, SINGLE, 0)
    yield FINAL_NORM_ROW
    if not config.tie_word_embeddings:
        yield lm_head_row(config)


class _StoredTensors:
    """The whole tensors of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = read_metadata(path)
        self._num_bytes = sum(file.stat().st_size for file in path.glob("*.distcp"))
        self.num_left = sum(  # numbers that were not read
            about.size.numel()
            for name, about in self._metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata) and not name.startswith("optimizer.")
        )

    def read(self, row: Row) -> Tensor:
        """Return the parameter of `row`, of all tensor-parallel ranks."""
        for name, place in itertools.chain.from_iterable(map(_places, row.mcore_names)):
            about = self._metadata.state_dict_metadata.get(name)
            if isinstance(about, TensorStorageMetadata):
                with errors_named(self._path):
                    return self._assemble(name, about, place)
        if any(".lora_a." in name for name in self._metadata.state_dict_metadata):
            raise ValueError(
                f"checkpoint {self._path}: holds LoRA adapters alone: must hold all weights, as hf/ of its run"
            )
        raise ValueError(f"checkpoint {self._path}: has no tensor for {', '.join(row.hf_names)}")

    def _assemble(self, name: str, about: TensorStorageMetadata, place: tuple[int, ...]) -> Tensor:
        """Return the part of a tensor that has these indices on its first axes."""
        shape, dtype = about.size[len(place) :], about.properties.dtype
        if math.prod(shape) * dtype.itemsize > self._num_bytes:
            raise ValueError(f"checkpoint {self._path}: {name} is larger than its files")
        whole = torch.empty(shape, dtype=dtype)
        num_filled = 0
        for chunk in about.chunks:
            offsets = tuple(chunk.offsets)
            if offsets[: len(place)] == place:
                part = self._chunk(name, chunk.offsets).view(chunk.sizes)[(0,) * len(place)]
                ends = zip(offsets[len(place) :], part.shape, strict=True)
                whole[tuple(slice(start, start + size) for start, size in ends)] = part
                num_filled += part.numel()
        if num_filled != whole.numel():
            raise ValueError(f"checkpoint {self._path}: {name} lacks a part")
        self.num_left -= num_filled
        return whole

    def _chunk(self, name: str, offsets: torch.Size) -> Tensor:
        info = self._metadata.storage_data[MetadataIndex(name, offsets)]
        file = self._path / info.relative_path
        try:
            with open_regular(file) as stream:
                stream.seek(info.offset)
                data = stream.read(info.length)
        except (OSError, MemoryError, OverflowError) as error:  # a length may be anything
            raise ValueError(f"{file}: {name} cannot be read: {error}") from error
        return parse_torch(f"{file}: {name}", data)


def _places(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each name under which a parameter may be stored, with its indices on the first axes."""
    place: tuple[int, ...] = ()
    if found := _EXPERT.search(name):
        name, place = _EXPERT.sub("experts.", name), (int(found[1]),)
    yield name, place
    if found := _LAYER.search(name):
        yield _LAYER.sub("", name), (int(found[1]), *place)
