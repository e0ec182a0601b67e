"""The checksum that rides with the weights."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.trainer.weight_sync import ChecksummedTensors


def test_checksum_is_of_the_cast_tensors_and_whole_after_the_iteration() -> None:
    tensors = [("a", torch.randn(5, 3)), ("b", torch.randn(7))]
    stream = ChecksummedTensors(iter(tensors), torch.bfloat16)
    received = dict(stream)
    assert received["a"].dtype == torch.bfloat16
    assert stream.checksum() == checksum_tensors(received.items())


def checksum_tensor(name: str, tensor: torch.Tensor) -> int:
    return checksum_tensors([(name, tensor)])


def test_checksum_sees_one_bit_a_swap_a_name_and_a_dtype() -> None:
    tensor = torch.arange(12.0)
    base = checksum_tensor("w", tensor)
    flipped = tensor.clone()
    flipped.view(torch.int32)[5] ^= 1
    swapped = tensor.clone()
    swapped[2], swapped[3] = tensor[3], tensor[2]
    others = [
        checksum_tensor("w", flipped),
        checksum_tensor("w", swapped),
        checksum_tensor("v", tensor),
        checksum_tensor("w", tensor.double()),
    ]
    assert base not in others
    assert checksum_tensor("w", tensor.view(3, 4).t().contiguous().t()) == base


def test_checksum_is_its_definition_across_chunks() -> None:
    tensor = torch.arange((1 << 22) + 5, dtype=torch.int16)
    with np.errstate(over="ignore"):
        bits = tensor.numpy().astype(np.int64)
        positions = np.arange(bits.size, dtype=np.int64) * 2 + 1
        mixed = (bits + 0x632BE5AB) * (positions * 0x2545F4914F6CDD1D)
        content = 1
        for start in (0, 1 << 22):
            part = mixed[start : start + (1 << 22)]
            content += int(((part ^ (part >> 31)) * 0x2545F4914F6CDD1D).sum())
    total = content * ((zlib.crc32(b"w") * 0x9E3779B97F4A7C15) | 1)
    assert checksum_tensor("w", tensor) == total % (1 << 63)
