"""Packed causal attention in compiled loops: its numbers, its gradients, and machines without
AVX-512.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tlt_megatron.models.attention import packed
from tlt_megatron.models.attention.causal_kernels import attend_sequences, differentiate_sequences

TOLERANCE = {torch.float32: 5e-7, torch.float64: 1e-14, torch.bfloat16: 4e-3}
LENGTHS = [1, 7, 8, 9, 70, 33]  # beside the 8 queries of a strip and the 32 columns of a tile


def draw(
    lengths: Sequence[int], heads: Sequence[int], size: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return query, key and value, parts of the same rows, and a gradient."""
    generator = torch.Generator().manual_seed(size)
    num_heads, num_kv_heads = heads
    shape = sum(lengths), 2 * num_heads + 2 * num_kv_heads, size
    rows = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return list(rows.split((num_heads, num_kv_heads, num_kv_heads, num_heads), dim=1))


def results(lengths: Sequence[int], tensors: Sequence[Tensor], scale: float) -> list[Tensor]:
    query, key, value, grad = tensors
    out, lse = attend_sequences(query, key, value, lengths, scale)
    inputs = query, key, value, out, lse
    return [out, lse, *differentiate_sequences(grad, *inputs, lengths, scale)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads, size", [((4, 2), 32), ((3, 3), 18), ((6, 2), 40), ((2, 1), 128)])
def test_numbers_are_those_of_torch(heads: tuple[int, int], size: int, dtype: torch.dtype) -> None:
    """In float64 over the same inputs."""
    tensors, scale = draw(LENGTHS, heads, size, dtype), 0.7 * size**-0.5
    found = results(LENGTHS, tensors, scale)
    query, key, value, grad = (each.double() for each in tensors)
    out, lse = packed._attend_each(query, key, value, LENGTHS, scale)
    inputs = query, key, value, out, lse
    grads = packed._differentiate_each(grad, *inputs, LENGTHS, scale)
    assert found[0].dtype == dtype
    for mine, exact in zip(found, [out, lse, *grads], strict=True):
        assert (mine - exact).norm() < TOLERANCE[dtype] * exact.norm()


def test_bits_of_a_sequence_do_not_depend_on_the_others() -> None:
    tensors, scale = draw(LENGTHS, (4, 2), 32, torch.float32), 32**-0.5
    together = [each.split(LENGTHS) for each in results(LENGTHS, tensors, scale)]
    parts = [each.split(LENGTHS) for each in tensors]
    for n, length in enumerate(LENGTHS):
        alone = results([length], [part[n] for part in parts], scale)
        assert all(map(torch.equal, alone, [each[n] for each in together]))


def test_training_takes_the_loops_with_one_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert packed._functions(cpu) == (attend_sequences, differentiate_sequences)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert packed._functions(cpu) == (packed._attend_each, packed._differentiate_each)


def test_vectors_of_a_machine_without_avx512() -> None:
    code = (
        "import llvmlite.binding; llvmlite.binding.get_host_cpu_features = dict\n"
        "import torch; torch.set_num_threads(1)\n"
        "from tests.unit.models import test_causal_kernels as test\n"
        "from tlt_megatron.models.attention import causal_kernels\n"
        "assert causal_kernels._VECTOR_BYTES == 32\n"
        "for dtype in (torch.float32, torch.float64):\n"
        "    test.test_numbers_are_those_of_torch((4, 2), 40, dtype)\n"
    )
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
