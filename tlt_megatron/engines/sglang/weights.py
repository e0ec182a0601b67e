"""Sends weights to a running SGLang engine: update sessions, in buckets, separately for target and drafter.

Called by the engine and by its followers. Without `selector` SGLang loads tensors into both target and drafter, so every
session here names its role. Each rank of a tensor-parallel engine offers its own copy, so that a scheduler reads the memory of
its own GPU. The CUDA part (IPC handles) follows SGLang's sources and has not run on hardware yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tlt_megatron.engines.sglang.connection import TARGET, Connection
from tlt_megatron.engines.sglang.replica import Replica

_BUCKET_BYTES = 256 << 20
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class WeightSender:
    """Weight sessions of one engine. Only the leader has a `connection`; followers offer their copies and wait."""

    def __init__(
        self,
        connection: Connection | None,
        replica: Replica,
        *,
        num_ranks: int,
        offers_own: bool,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        """`offers_own`: every rank offers its own copy. On a CPU it is False and all use the leader's copy: only children of a
        process can open its shared memory."""
        self._connection = connection
        self._offers_own = offers_own
        self._replica = replica
        self._num_ranks = num_ranks  # of the engine's tensor parallelism
        self._bucket_bytes = bucket_bytes

    def send(self, tensors: Iterable[tuple[str, Tensor]], *, role: str, version: str) -> None:
        """Load named tensors into the model of one role. All ranks of the replica must call it, with the same names in the same
        order. RuntimeError if SGLang refuses a bucket."""
        with self._session(role):
            for bucket, is_last in _with_last(self._buckets(tensors)):
                self._send_bucket(bucket, role=role, version=version, is_last=is_last)

    @contextmanager
    def _session(self, role: str) -> Iterator[None]:
        if self._connection is None:
            yield
            return
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        self._connection.call("begin_weight_update", BeginWeightUpdateReqInput(selector=role))
        try:
            yield
        finally:
            self._connection.call("end_weight_update", EndWeightUpdateReqInput())

    def _send_bucket(
        self, bucket: list[tuple[str, Tensor]], *, role: str, version: str, is_last: bool
    ) -> None:
        """Send one bucket. On a GPU it is sent as an IPC handle and must outlive the call; on a CPU through shared memory."""
        flat = _flatten(bucket) if self._connection is not None or self._offers_own else None
        payloads = self._payloads(flat)
        with self._replica.in_step(f"sending {role} weights"):
            if self._connection is not None:
                self._update(payloads, role=role, version=version, is_last=is_last)

    def _payloads(self, flat: dict[str, object] | None) -> list[bytes]:
        """Return one payload per rank of the engine. A payload can be read only once. Followers return none."""
        if self._replica.size == 1 and self._connection is not None:
            return [_serialize(flat) for _ in range(self._num_ranks)]
        offered = self._replica.gather(_serialize(flat) if self._offers_own else None)
        if self._connection is None:
            return []
        return [_serialize(flat) if payload is None else payload for payload in offered]

    def _update(self, payloads: list[bytes], *, role: str, version: str, is_last: bool) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format="flattened_bucket",
            selector=role,
            # Drafter weights do not change the policy's KV. The last bucket of the policy drops the old KV.
            flush_cache=is_last and role == TARGET,
            weight_version=version if is_last and role == TARGET else None,
        )
        self._connection.call("update_weights_from_tensor", request)

    def _buckets(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name, tensor in tensors:
            tensor = tensor.detach().contiguous()
            if bucket and num_bytes + tensor.nbytes > self._bucket_bytes:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append((name, tensor))
            num_bytes += tensor.nbytes
        if bucket:
            yield bucket
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def _flatten(bucket: list[tuple[str, Tensor]]) -> dict[str, object]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=bucket)
    return {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}


def _serialize(flat: dict[str, object] | None) -> bytes:
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.serialize(flat)


def _with_last(buckets: Iterator[list]) -> Iterator[tuple[list, bool]]:
    held = next(buckets, None)
    while held is not None:
        following = next(buckets, None)
        yield held, following is None
        held = following


class BorrowedTensors:
    """Embedding and LM head of the policy, for a drafter that trains in this process. `keep` updates them in place."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def keep(self, name: str, tensor: Tensor) -> None:
        """Copy `tensor` if it is one of the two."""
        if name not in (_EMBEDDING, _HEAD):
            return
        if name in self._held:
            self._held[name].copy_(tensor)
        else:
            self._held[name] = tensor.clone()

    @property
    def embedding_VD(self) -> Tensor:
        """Return [V, D]."""
        return self._held[_EMBEDDING]

    @property
    def lm_head_VD(self) -> Tensor:
        """Return [V, D]; the embedding itself if the policy ties them."""
        return self._held.get(_HEAD, self._held[_EMBEDDING])


def cast_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    borrowed: BorrowedTensors | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on the engine's device and in its dtype. Copy those that a drafter borrows to `borrowed`."""
    for name, tensor in tensors:
        tensor = tensor.detach().to(device, dtype)
        if borrowed is not None:
            borrowed.keep(name, tensor)
        yield name, tensor
