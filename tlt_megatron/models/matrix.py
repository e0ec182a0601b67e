"""A weight matrix that picks the faster of torch's kernels for the number of rows. On a CPU with
compiled loops `compiled_pass.CompiledMatrix` takes its place.

On a CPU, torch's BLAS is fast for one or two rows and slow for the tens of rows of a verify pass.
oneDNN on a packed copy is the opposite. The choice depends on shapes alone, never on timings, so a
rerun repeats its numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.runtime.device import has_loops

_PACK_ROWS = 8  # row count that oneDNN packs for; other row counts run as fast on the result
# Multiplications above which oneDNN is faster in float32, despite its overhead per call (0.4-0.5
# million on AVX-512).
_PACKED_MULTIPLICATIONS = 450_000


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a matrix of this dtype has a packed copy on this device."""
    return has_loops(device) or _is_for_onednn(dtype, device)


def _is_for_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


class Matrix:
    """y = x @ weight.T + bias, or + addend. Call `refresh` after `weight` [out, in] changes.

    Example: `matrix = Matrix(weight); y_PO = matrix(x_PI)`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._packed: Tensor | None = None
        # bfloat16 uses the packed copy from one row on: it has no other fast path for few rows.
        self._min_rows = 1
        if weight.dtype == torch.float32:
            self._min_rows = max(1, _PACKED_MULTIPLICATIONS // max(weight.numel(), 1))
        self.refresh()

    @classmethod
    def empty(
        cls,
        num_out: int,
        num_in: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool = False,
    ) -> Matrix:
        """Return a matrix that owns its weight, for `set`. Column-major: faster for one row."""
        bias = torch.zeros(num_out, dtype=dtype, device=device) if has_bias else None
        return cls(torch.zeros(num_in, num_out, dtype=dtype, device=device).t(), bias)

    def set(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy `weight` [out, in], and `bias` [out] if it has one, into this matrix."""
        self._weight.copy_(weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Rewrite the packed copy from the current weight."""
        if _is_for_onednn(self._weight.dtype, self._weight.device):
            dense = self._weight.contiguous()
            self._packed = torch.ops.mkldnn._reorder_linear_weight(dense, _PACK_ROWS)

    def tensors(self) -> list[Tensor]:
        """Return weight and bias, not copied."""
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """Return [P, out] for x [P, in]. `addend` [P, out] is not changed."""
        if self._packed is not None and x.shape[0] >= self._min_rows:
            out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return out if addend is None else out.add_(addend)
        if addend is not None and self._bias is None:
            return torch.addmm(addend, x, self._transposed)
        out = F.linear(x, self._weight, self._bias)
        return out if addend is None else out.add_(addend)
