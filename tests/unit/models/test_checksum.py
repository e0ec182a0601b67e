"""The checksum that weights are verified by after a transfer: every kind of mix-up shows."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from tlt_megatron.models.hf_io import checksum_tensors
from tools.gpu.pretend_cuda import CUDA, PretendGpu


def checksum_tensor(name: str, tensor: torch.Tensor) -> int:
    return checksum_tensors([(name, tensor)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_it_is_of_the_exact_bits_in_order(dtype: torch.dtype) -> None:
    a = (torch.arange(24) * 7 - 40).to(dtype).view(4, 6)
    expected = checksum_tensor("a", a)
    assert expected == checksum_tensor("a", a.clone())
    assert expected == checksum_tensor("a", a.t().contiguous().t())
    swapped = a.flatten()[torch.tensor([1, 0, *range(2, 24)])]
    changed = a.clone()
    changed[3, 5] += 1
    others = [a.flip(0), a.roll(1), swapped.view(4, 6), changed, a + 1, a[:3]]
    sums = {checksum_tensor("a", other) for other in others}
    assert len(sums) == len(others)
    assert expected not in sums


def test_tensors_that_change_places_show() -> None:
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    assert checksum_tensors([("x", a), ("y", b)]) != checksum_tensors([("x", b), ("y", a)])
    assert checksum_tensors([("x", a), ("y", b)]) == checksum_tensors([("y", b), ("x", a)])


@pytest.mark.parametrize("count", [0, 1, 1000, (1 << 18) + 1, (1 << 19) + 77])
def test_it_is_the_definition_however_the_tensor_is_cut(count: int) -> None:
    tensor = torch.randint(1 << 31, (count,), dtype=torch.int32)
    mix = 0x2545F4914F6CDD1D
    weights = (np.arange(count, dtype=np.uint64) * 2 + 1) * np.uint64(mix)
    mixed = (tensor.numpy().astype(np.uint64) + np.uint64(0x632BE5AB)) * weights
    mixed ^= (mixed.view(np.int64) >> 31).view(np.uint64)
    content = 1 + int(mixed.sum(dtype=np.uint64)) * mix
    name = (zlib.crc32(b"x") * 0x9E3779B97F4A7C15) | 1
    assert checksum_tensor("x", tensor) == content * name % (1 << 63)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU cannot be pretended beside a real one")
def test_tensors_on_a_gpu_give_the_same_value_in_one_transfer() -> None:
    sizes = (0, 1, 77, (1 << 18) + 3)
    here = [(str(n), torch.randn(n, dtype=torch.bfloat16)) for n in sizes]
    there, count = PretendGpu(), ("count", torch.tensor(3))
    with there:
        moved = [(name, tensor.to(CUDA)) for name, tensor in here]
        assert checksum_tensors([count, *moved]) == checksum_tensors([*here, count])
        assert there.read_backs.total() == 1
