"""The checksum that rides with the weights."""

from __future__ import annotations

import torch

from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.trainer.weight_sync import ChecksummedTensors


def test_checksum_is_of_the_cast_tensors_and_whole_after_the_iteration() -> None:
    tensors = [("a", torch.randn(5, 3)), ("b", torch.randn(7))]
    stream = ChecksummedTensors(iter(tensors), torch.bfloat16)
    received = dict(stream)
    assert received["a"].dtype == torch.bfloat16
    assert stream.checksum() == checksum_tensors(received.items()) != checksum_tensors(tensors)
