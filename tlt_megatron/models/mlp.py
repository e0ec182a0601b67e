"""The MLP of a decoder layer for inference: dense, or a mixture of experts (on a CPU).

`Transformer.pack` makes one per layer, from the arithmetic of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.matrix import Matrix

Mlp = Callable[[Tensor, Tensor], Tensor]  # x [P, D], addend [P, D] -> [P, D]


class DenseMlp:
    """down(gate(x) * up(x)) + addend. `gate` is the activation of the arithmetic."""

    def __init__(
        self, gate_up: Matrix, down: Matrix, gate: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._gate = gate

    def __call__(self, x_PD: Tensor, addend_PD: Tensor | None = None) -> Tensor:
        gate_PF, up_PF = self._gate_up(x_PD).chunk(2, dim=-1)
        return self._down(self._gate(gate_PF, up_PF), addend_PD)


class ExpertsMlp:
    """The weighted sum of a token's experts, + addend. The router computes in at least float32.

    Each expert multiplies the rows of its tokens alone, and a token's experts are added in the
    order of their scores. So with batch-invariant matrices a row does not depend on other rows.
    """

    def __init__(
        self, router: Matrix, experts: Sequence[DenseMlp], *, num_per_token: int, normalizes: bool
    ) -> None:
        self._router = router
        self._experts = experts
        self._num_per_token = num_per_token
        self._normalizes = normalizes

    def __call__(self, x_PD: Tensor, addend_PD: Tensor) -> Tensor:
        scores_PE = self._router(x_PD.to(wide_dtype(x_PD.dtype)))
        best_PK, chosen_PK = scores_PE.topk(self._num_per_token, dim=1)
        if self._normalizes:
            weights_PK = best_PK.softmax(dim=1)
        else:
            weights_PK = scores_PE.softmax(dim=1).gather(1, chosen_PK)
        weights_PK = weights_PK.to(x_PD.dtype)
        out_PKD = x_PD.new_empty(*chosen_PK.shape, x_PD.shape[1])
        for expert in chosen_PK.unique().tolist():
            tokens, places = (chosen_PK == expert).nonzero(as_tuple=True)
            out_PKD[tokens, places] = self._experts[expert](x_PD[tokens])
        sum_PD = addend_PD
        for place in range(self._num_per_token):
            sum_PD = sum_PD + out_PKD[:, place] * weights_PK[:, place, None]
        return sum_PD


def check_softmax(num_experts: int, dtype: torch.dtype) -> None:
    """Raise RuntimeError if a row of the router's softmax depends on the other rows."""
    scores = torch.linspace(-30.0, 30.0, 131 * num_experts, dtype=wide_dtype(dtype))
    scores = scores.view(num_experts, 131).t().contiguous()
    expected = torch.cat([row.softmax(dim=1) for row in scores.split(1)])
    for num_rows in (2, 7, 32, 131):
        if not torch.equal(scores[:num_rows].softmax(dim=1), expected[:num_rows]):
            raise RuntimeError(
                f"rollout.batch_invariant=True: on this machine the softmax of {num_rows} rows of"
                f" {num_experts} experts is not that of each row"
            )
