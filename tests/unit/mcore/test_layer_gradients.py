"""Norm, gate and rotation of the local layers as compiled loops: their numbers and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny_models import tiny_config
from tlt_megatron.config.schema import McoreSection, ParallelSection
from tlt_megatron.mcore import cpu, layer_gradients
from tlt_megatron.mcore import model as mcore_model
from tlt_megatron.mcore.model import transformer_config
from tlt_megatron.runtime.device import select_device

TOLERANCE = {torch.float32: 2e-7, torch.float64: 1e-14, torch.bfloat16: 6e-3}
DTYPES = list(TOLERANCE)


def require_equal_numbers(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Compare results and gradients with float64 of the same inputs: a few roundings."""
    dtype, wide = inputs[0].dtype, torch.float64
    mine = [each.detach().requires_grad_() for each in inputs]
    exact = [each.detach().to(wide).requires_grad_() for each in inputs]
    found, expected = ours(*mine), theirs(*exact)
    grad = torch.linspace(-1, 1, found.numel()).view(found.shape).transpose(0, -1).to(dtype)
    grad = grad.contiguous().transpose(0, -1)  # autograd may give any strides
    pairs = [(found, expected)]
    for_inputs = torch.autograd.grad(found, mine, grad)
    pairs += zip(for_inputs, torch.autograd.grad(expected, exact, grad.to(wide)), strict=True)
    for result, right in pairs:
        assert result.dtype == dtype
        error = (result - right).norm() / right.norm()
        assert error < TOLERANCE[dtype], error


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1, 130), (2000, 1, 128), (7, 1, 4, 18)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The weight's gradient is a sum over thousands of rows. Heads are parts of wider rows."""
    x = 3 * normal(*shape, dtype=dtype)
    wider = torch.cat((x, x), dim=-1)[..., : shape[-1]]
    weight = normal(shape[-1], dtype=dtype, seed=1)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return layer_gradients.Norm.apply(x, weight, 1e-5)

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (shape[-1],), weight, 1e-5)

    require_equal_numbers(ours, theirs, [wider, weight])


def local_config(dtype: torch.dtype) -> Any:
    """Megatron's configuration of a policy on a CPU."""
    return transformer_config(
        tiny_config(),
        parallel=ParallelSection(),
        section=McoreSection(),
        dtype=dtype,
        device=select_device("cpu"),
    )


def test_a_norm_of_mixed_dtypes_is_torchs() -> None:
    """Residuals may stay float32 beside bfloat16 weights (`fp32_residual_connection`)."""
    x = normal(3, 4, dtype=torch.float32)
    found = mcore_model.RMSNorm(local_config(torch.bfloat16), 4)(x)
    torch.testing.assert_close(found, F.rms_norm(x, (4,), None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 384])
def test_gate(size: int, dtype: torch.dtype) -> None:
    halves = 3 * normal(6, 1, 2 * size, dtype=dtype)
    halves[0, 0, 0] = -300.0  # where exp overflows

    def theirs(halves: Tensor) -> Tensor:
        gate, up = halves.chunk(2, dim=-1)
        return F.silu(gate) * up

    require_equal_numbers(layer_gradients.Gate.apply, theirs, [halves])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size, num_turned, mscale", [(32, 32, 1.0), (18, 18, 1.3), (40, 16, 1.0)])
def test_rotation(size: int, num_turned: int, mscale: float, dtype: torch.dtype) -> None:
    """Part of a head may turn, as in GLM. YaRN scales."""
    cpu.install()
    from megatron.core.models.common.embeddings import rope_utils

    heads = normal(5, 1, 6, size, dtype=dtype)[:, :, 1:4]  # parts of a layer's rows
    freqs = torch.linspace(0, 7, 5 * num_turned // 2).view(5, 1, 1, -1).repeat(1, 1, 1, 2)
    compiled = rope_utils._apply_rotary_pos_emb_bshd

    def theirs(heads: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "has_loops", lambda _: False)
            return compiled(heads, freqs, mscale=mscale)

    require_equal_numbers(lambda x: compiled(x, freqs, mscale=mscale), theirs, [heads])


def test_megatron_calls_the_loops_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.install()
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import mlp

    called: list[str] = []
    for name in ("Gate", "Norm", "Rotation"):
        original = getattr(layer_gradients, name).apply

        def apply(*given: Any, name: str = name, original: Any = original) -> Tensor:
            called.append(name)
            return original(*given)

        monkeypatch.setattr(getattr(layer_gradients, name), "apply", apply)
    config = local_config(torch.float32)
    assert config.bias_activation_fusion
    norm = mcore_model.RMSNorm(config, 4)
    ones = torch.ones(2, 1, 1, 4)

    def run() -> list[Tensor]:
        return [
            mlp.bias_swiglu_impl(ones[0], None, False, False),
            norm(ones),
            rope_utils._apply_rotary_pos_emb_bshd(ones, ones),
        ]

    found = run()
    assert called == ["Gate", "Norm", "Rotation"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch.testing.assert_close(run(), found)
    assert len(called) == 3
