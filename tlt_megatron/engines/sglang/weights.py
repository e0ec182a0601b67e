"""Sends weights to a running SGLang engine: update sessions, in buckets, for target or drafter.

Without `selector` SGLang loads tensors into both, so every session names its role. Each rank of a
tensor-parallel engine offers its own copy, so that a scheduler reads the memory of its own GPU. The
CUDA part (IPC handles) follows SGLang's sources and has not run on hardware yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_megatron.engines.sglang.connection import TARGET, Connection
from tlt_megatron.engines.sglang.replica import in_step
from tlt_megatron.models.hf_io import dtype_of
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import Group

_BUCKET_BYTES = 256 << 20
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(eq=False)
class WeightSender:
    """Weight sessions of one engine. Only the leader has a `connection`; followers wait.

    It also keeps copies of the embedding and LM head if there is a drafter, which borrows them."""

    connection: Connection | None
    replica: Group
    device: torch.device
    dtype: torch.dtype
    num_ranks: int  # size of the engine's tensor parallelism
    # Whether every rank offers its own copy. On a CPU all use the leader's, because only children
    # of a process can open its shared memory.
    offers_own: bool
    has_drafter: bool = False
    bucket_bytes: int = _BUCKET_BYTES
    _borrowed: dict[str, Tensor] = field(default_factory=dict)

    def send(self, tensors: Iterable[tuple[str, Tensor]], *, role: str, version: str) -> None:
        """Cast named tensors and load them into the model of one role. All ranks must call it, with
        the same names in the same order. RuntimeError if SGLang refuses a bucket."""
        with self._session(role):
            for bucket, is_last in self._buckets(self.cast(tensors)):
                # On a GPU `flat` is sent as an IPC handle and must outlive the update.
                has_reader = self.connection is not None or self.offers_own
                flat = _flatten(bucket) if has_reader else None
                payloads = self._payloads(flat)
                with in_step(f"sending {role} weights", self.replica):
                    self._update(payloads, role, version if is_last else None)

    def cast(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors on the engine's device and in its dtype. Copy what a drafter borrows,
        in place from the second time on."""
        for name, tensor in tensors:
            tensor = tensor.detach().to(self.device, dtype_of(name, self.dtype))
            if self.has_drafter and name in (_EMBEDDING, _HEAD):
                if name in self._borrowed:
                    self._borrowed[name].copy_(tensor)
                else:
                    self._borrowed[name] = tensor.clone()
            yield name, tensor

    def target_tensors(self) -> tuple[Tensor, Tensor]:
        """Return embedding and LM head [V, D], one tensor if tied. RuntimeError if none were
        kept.
        """
        if not self._borrowed:
            raise RuntimeError("target_tensors: the engine needs a learned drafter and weights")
        embedding = self._borrowed[_EMBEDDING]
        return embedding, self._borrowed.get(_HEAD, embedding)

    @contextmanager
    def _session(self, role: str) -> Iterator[None]:
        if self.connection is None:
            yield
            return
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        self.connection.call("begin_weight_update", BeginWeightUpdateReqInput(selector=role))
        try:
            yield
        finally:
            self.connection.call("end_weight_update", EndWeightUpdateReqInput())

    def _payloads(self, flat: dict[str, object] | None) -> list[bytes]:
        """Return one payload per rank of the engine, as each can be read once. Followers: none."""
        if self.replica.size == 1 and self.connection is not None:
            return [_serialize(flat) for _ in range(self.num_ranks)]
        offered = gather_objects(_serialize(flat) if self.offers_own else None, self.replica)
        if self.connection is None:
            return []
        return [_serialize(flat) if payload is None else payload for payload in offered]

    def _update(self, payloads: list[bytes], role: str, last_of: str | None) -> None:
        """Give SGLang one bucket. `last_of`: the version whose last bucket it is."""
        if self.connection is None:
            return
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        # The last bucket drops the KV of cached prompts: the drafter has its own in the same slots.
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format="flattened_bucket",
            selector=role,
            flush_cache=last_of is not None,
            weight_version=last_of if role == TARGET else None,
        )
        self.connection.call("update_weights_from_tensor", request)

    def _buckets(
        self, tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
        """Yield (bucket, whether it is the last)."""
        bucket: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name, tensor in tensors:
            tensor = tensor.detach().contiguous()
            if bucket and num_bytes + tensor.nbytes > self.bucket_bytes:
                yield bucket, False
                bucket, num_bytes = [], 0
            bucket.append((name, tensor))
            num_bytes += tensor.nbytes
        if bucket:
            yield bucket, True
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def _flatten(bucket: list[tuple[str, Tensor]]) -> dict[str, object]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=bucket)
    return {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}


def _serialize(flat: dict[str, object] | None) -> bytes:
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.serialize(flat)
