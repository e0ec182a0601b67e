"""Weights into a running SGLang engine: update sessions, in buckets, target and drafter apart, verified by checksum.

Called by the engine. What to know: SGLang loads tensors without `selector` into target and drafter alike, so every session
here names its role; and what is compared afterwards is what the scheduler holds, not what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tlt_megatron.engines.sglang.connection import TARGET, Connection

_BUCKET_BYTES = 256 << 20
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class WeightSender:
    """One engine's weight sessions."""

    def __init__(
        self, connection: Connection, *, num_ranks: int, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        self._connection = connection
        self._num_ranks = num_ranks  # of the engine's tensor parallelism
        self._bucket_bytes = bucket_bytes

    def send(self, tensors: Iterable[tuple[str, Tensor]], *, role: str, version: str) -> None:
        """Load named tensors into the model of one role. RuntimeError if SGLang refuses any of it."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        self._connection.call("begin_weight_update", BeginWeightUpdateReqInput(selector=role))
        try:
            for bucket, is_last in _with_last(self._buckets(tensors)):
                self._send_bucket(bucket, role=role, version=version, is_last=is_last)
        finally:
            self._connection.call("end_weight_update", EndWeightUpdateReqInput())

    def _send_bucket(
        self, bucket: list[tuple[str, Tensor]], *, role: str, version: str, is_last: bool
    ) -> None:
        """On a GPU the bucket travels as an IPC handle and must outlive the call, on a CPU through shared memory."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=bucket)
        content = {
            "flattened_tensor": flat.get_flattened_tensor(),
            "metadata": flat.get_metadata(),
        }
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize(content) for _ in range(self._num_ranks)
            ],
            load_format="flattened_bucket",
            selector=role,
            # Drafts do not change the policy's keys and values; of the policy's, the old ones go with the last bucket.
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


def _with_last(buckets: Iterator[list]) -> Iterator[tuple[list, bool]]:
    held = next(buckets, None)
    while held is not None:
        following = next(buckets, None)
        yield held, following is None
        held = following


class BorrowedTensors:
    """Embedding and LM head of the policy, for a drafter that trains in this process; the tensors stay, contents change."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def keep(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor that passes by, if it is one of the two."""
        if name not in (_EMBEDDING, _HEAD):
            return
        if name in self._held:
            self._held[name].copy_(tensor)
        else:
            self._held[name] = tensor.clone()

    @property
    def embedding_VD(self) -> Tensor:
        """[V, D]."""
        return self._held[_EMBEDDING]

    @property
    def lm_head_VD(self) -> Tensor:
        """[V, D]; the embedding itself where the policy ties them."""
        return self._held.get(_HEAD, self._held[_EMBEDDING])
