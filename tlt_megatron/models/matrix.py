"""A weight matrix and the quickest way to multiply by it for the number of rows at hand.

Used by the policy's and the drafter's forward passes. What to know: on a CPU the BLAS that torch ships is quick for one or
two rows and slow for the tens that a verify pass has; oneDNN on a packed copy is the other way round. The choice follows
from shapes alone, never from a timing, so that a rerun repeats its numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_ROWS = 8  # of a pass, for which oneDNN lays a packed matrix out; others run as fast on it
# Multiplications from which oneDNN's overhead per call is repaid in float32 (measured: 0.4-0.5 million on AVX-512).
_PACKED_MULTIPLICATIONS = 450_000


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can multiply by a packed matrix of this dtype here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


class Matrix:
    """y = x @ weight.T + bias, or + addend. `weight` [out, in] stays where it is; call `refresh` after it has changed.

    Example: `matrix = Matrix(weight); y_PO = matrix(x_PI)`.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, min_rows: int | None = None
    ) -> None:
        """`min_rows` is from how many rows on the packed copy is used; None: from where it is quicker."""
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._packed: Tensor | None = None
        # Rows from which the packed copy is used: bfloat16 has no quick path for few rows either.
        self._min_rows = 1 if min_rows is None else min_rows
        if weight.dtype == torch.float32 and min_rows is None:
            self._min_rows = max(1, _PACKED_MULTIPLICATIONS // max(weight.numel(), 1))
        self.refresh()

    @classmethod
    def empty(cls, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device) -> Matrix:
        """One with a weight of its own, for `set`; laid out by columns, which is quicker for one row."""
        return cls(torch.zeros(num_in, num_out, dtype=dtype, device=device).t())

    def set(self, weight: Tensor) -> None:
        """Copy [out, in] in."""
        self._weight.copy_(weight)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over what `weight` holds now; the packed copy is written anew."""
        if packs(self._weight.dtype, self._weight.device):
            dense = self._weight.contiguous()
            self._packed = torch.ops.mkldnn._reorder_linear_weight(dense, _PACK_ROWS)

    @property
    def weight(self) -> Tensor:
        """[out, in], where it lies."""
        return self._weight

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and of its packed copy."""
        return self._weight.nbytes * (1 if self._packed is None else 2)

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """[P, out] of x [P, in]; `addend` [P, out] is not changed."""
        if self._packed is not None and x.shape[0] >= self._min_rows:
            out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return out if addend is None else out.add_(addend)
        if addend is None:
            return F.linear(x, self._weight, self._bias)
        return torch.addmm(addend, x, self._transposed)
