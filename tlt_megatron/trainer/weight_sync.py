"""Copies weights from the trainer to the engine of the same rank, with version and checksum."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_megatron.engines.base import RolloutEngine
from tlt_megatron.models.hf_io import Checksum, dtype_of
from tlt_megatron.policy.health import check_weights
from tlt_megatron.policy.interfaces import PolicyModel
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import Group


@dataclass
class ChecksummedTensors:
    """Iterates over named tensors for an engine, casts them to its dtype, and updates a checksum.

    `checksum` covers the tensors so far, so it is complete after the iteration.
    """

    tensors: Iterable[tuple[str, Tensor]]
    dtype: torch.dtype
    num_bytes: int = 0  # as the trainer holds them
    gather_s: float = 0.0  # in which the consumer waited for the next tensor
    _checksum: Checksum = field(default_factory=Checksum)
    _are_finite: list[tuple[str, Tensor]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        tensors = iter(self.tensors)
        while True:
            started = time.perf_counter()
            name, tensor = next(tensors, ("", None))
            self.gather_s += time.perf_counter() - started
            if tensor is None:
                return
            self.num_bytes += tensor.nbytes
            tensor = tensor.detach().to(dtype_of(name, self.dtype))
            self._checksum.add(name, tensor)
            self._are_finite.append((name, torch.isfinite(tensor).all()))
            yield name, tensor

    def checksum(self) -> int:
        """Return the checksum of all tensors so far."""
        return self._checksum.value()

    def nonfinite(self) -> str:
        """Return the name of the first tensor with NaN or infinity so far, or ""."""
        return next((name for name, is_finite in self._are_finite if not is_finite), "")


def push_policy(
    model: PolicyModel, engine: RolloutEngine, version: int, *, dtype: torch.dtype, world: Group
) -> dict[str, float]:
    """Load the policy into every engine as `version`, and return metrics of this rank. A
    collective.

    Extra memory is at most two layers. On every rank, RuntimeError names the ranks that were sent
    other weights, and UnhealthyTrainingError the weights that are not finite.
    """
    stream = ChecksummedTensors(model.export_hf_weights(), dtype)
    started = time.perf_counter()
    engine.load_weights(stream, version=version, checksum=stream.checksum)
    load_s = time.perf_counter() - started - stream.gather_s
    sent = gather_objects((stream.checksum(), stream.nonfinite()), world)
    check_weights(version, [nonfinite for _, nonfinite in sent])
    checksums = [checksum for checksum, _ in sent]
    strays = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
    if strays:
        raise RuntimeError(
            f"policy version {version}: ranks {strays} were sent other weights than rank 0"
        )
    return {
        "weight_sync/gb": stream.num_bytes / 1e9,
        "weight_sync/gather_s": stream.gather_s,
        "weight_sync/load_s": load_s,
    }
