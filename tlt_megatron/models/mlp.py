"""The MLP of a decoder layer for inference: dense, or a mixture of experts (on a CPU).

`Transformer.pack` makes one per layer, from the arithmetic of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.config import ExpertsConfig
from tlt_megatron.models.matrix import Matrix

Mlp = Callable[[Tensor, Tensor | None], Tensor]  # x [P, D], addend [P, D] -> [P, D]


@dataclass(slots=True)
class DenseMlp:
    """down(gate(x) * up(x)) + addend. `gate` is the activation of the arithmetic."""

    gate_up: Matrix
    down: Matrix
    gate: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x_PD: Tensor, addend_PD: Tensor | None = None) -> Tensor:
        gate_PF, up_PF = self.gate_up(x_PD).chunk(2, dim=-1)
        return self.down(self.gate(gate_PF, up_PF), addend_PD)


@dataclass(slots=True, kw_only=True)
class ExpertsMlp:
    """The weighted sum of a token's experts, + the shared experts, + addend.

    Each expert multiplies the rows of its tokens alone, and a token's experts are added in the
    order of their scores. So with batch-invariant matrices a row does not depend on other rows.
    """

    config: ExpertsConfig
    router: Matrix  # in at least float32
    bias_E: Tensor | None  # in at least float32, for a router of sigmoids
    parts: Sequence[DenseMlp]
    shared: DenseMlp | None
    chosen_PK: Tensor = field(init=False)  # experts of the newest call's tokens

    def __call__(self, x_PD: Tensor, addend_PD: Tensor | None = None) -> Tensor:
        scores_PE = self.router(x_PD.to(wide_dtype(x_PD.dtype)))
        weights_PK, chosen_PK = route(scores_PE, self.bias_E, self.config)
        self.chosen_PK = chosen_PK
        weights_PK = weights_PK.to(x_PD.dtype)
        out_PKD = x_PD.new_empty(*chosen_PK.shape, x_PD.shape[1])
        for expert in chosen_PK.unique().tolist():
            tokens, places = (chosen_PK == expert).nonzero(as_tuple=True)
            out_PKD[tokens, places] = self.parts[expert](x_PD[tokens])
        sum_PD = addend_PD if self.shared is None else self.shared(x_PD, addend_PD)
        for place in range(self.config.num_per_token):
            part_PD = out_PKD[:, place] * weights_PK[:, place, None]
            sum_PD = part_PD if sum_PD is None else sum_PD + part_PD
        assert sum_PD is not None
        return sum_PD


def route(scores_PE: Tensor, bias_E: Tensor | None, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of each token's experts, [P, K] each, the best one
    first.
    """
    if bias_E is not None:
        # The sigmoid, by an exp that is the same at every place of a tensor. torch's own differs
        # between the vectors of a tensor and the elements after the last vector.
        scores_PE = 1.0 / (1.0 + (-scores_PE).exp())
        chosen_PK = (scores_PE + bias_E).topk(config.num_per_token, dim=1).indices
        weights_PK = scores_PE.gather(1, chosen_PK)
        weights_PK = weights_PK / (weights_PK.sum(dim=1, keepdim=True) + 1e-20)
    elif config.normalizes:
        best_PK, chosen_PK = scores_PE.topk(config.num_per_token, dim=1)
        weights_PK = best_PK.softmax(dim=1)
    else:
        chosen_PK = scores_PE.topk(config.num_per_token, dim=1).indices
        weights_PK = scores_PE.softmax(dim=1).gather(1, chosen_PK)
    return weights_PK * config.scaling, chosen_PK
