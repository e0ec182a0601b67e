"""A row's result in every part of the invariant arithmetic has the same bits, whatever rows are
beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tiny_models import make_tiny_hf
from tlt_megatron.models.compiled_pass import CompiledMatrix
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.invariant_arithmetic import invariant_arithmetic
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.runtime.device import has_triton

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def cancelling(num_rows: int, size: int, seed: int, sign: float) -> Tensor:
    """Return [num_rows, size] whose second half mirrors the first, times `sign`.

    The product of one with sign +1 and one with -1 is 0 except for rounding. So another order of
    addition is visible even after rounding to bfloat16.
    """
    half = torch.randn(num_rows, size // 2, generator=torch.Generator().manual_seed(seed))
    middle = torch.zeros(num_rows, size % 2)
    return torch.cat((half, middle, sign * half.flip(1)), dim=1)


def differing_batches(run: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> list[int]:
    """Return the sizes of random batches of rows of x for which `run` does not give the rows of
    `expected`.
    """
    draw, found = random.Random(0), []
    for size in [*range(1, 20), 33, 64, 100, 257, 300]:
        rows = torch.tensor([draw.randrange(x.shape[0]) for _ in range(size)])
        if not torch.equal(run(x[rows]), expected[rows]):
            found.append(size)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_out, num_in", [(128, 64), (64, 1536), (24, 100), (7, 41)])
def test_a_row_of_a_product_is_the_same_in_every_batch(
    num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    weight = cancelling(num_out, num_in, 3, 1.0).to(dtype)
    bias = torch.linspace(-1, 1, num_out).to(dtype) * 1e-6
    matrix = CompiledMatrix(weight, bias)
    x = cancelling(300, num_in, 4, -1.0).to(dtype)
    expected = torch.cat([matrix(row) for row in x.split(1)])
    assert expected.abs().max() > 0
    assert differing_batches(matrix, x, expected) == []
    addend = torch.randn(300, num_out).to(dtype)
    assert torch.equal(matrix(x, addend), expected + addend)


def test_with_onednn_a_row_of_a_product_differs() -> None:
    """If it did not, the test above would show nothing."""
    matrix = Matrix(cancelling(64, 1536, 3, 1.0))
    x = cancelling(300, 1536, 4, -1.0)
    expected = torch.cat([matrix(row) for row in x.split(1)])
    assert differing_batches(matrix, x, expected)


@pytest.mark.skipif(has_triton(), reason="tests/kernels and tests/gpu run the kernels")
def test_a_gpu_without_triton_is_refused(tmp_path) -> None:
    config = load_model_config(make_tiny_hf(tmp_path, "llama", num_layers=1))
    with pytest.raises(ValueError, match=r"must be false on device 'cuda' without Triton"):
        invariant_arithmetic(config, torch.float32, torch.device("cuda"))


def test_a_cpu_without_numba_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt_megatron.models.invariant_arithmetic.has_numba", lambda: False)
    config = load_model_config(make_tiny_hf(tmp_path, "llama", num_layers=1))
    with pytest.raises(ValueError, match=r"must be false on a CPU without numba"):
        invariant_arithmetic(config, torch.float32, CPU)
