"""The experts to which transformers sends the tokens of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tlt_megatron.types import Rollout


def open_mixture(path: Path) -> tuple[Any, Callable[[Rollout], Tensor]]:
    """Return the model in float64, and a function of a rollout: the experts of all its tokens but
    the last, sorted, [N, L, K].
    """
    from transformers import AutoModelForCausalLM

    eager = {"experts_implementation": "eager"}  # the others have no float64
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **eager).eval()
    chosen: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        chosen.append(inputs[1])  # hidden states, numbers and weights of the experts

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(note)

    def routes_of(rollout: Rollout) -> Tensor:
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([[*rollout.prompt_ids, *rollout.token_ids.tolist()]]))
        routes = [each.view(rollout.num_tokens, -1) for each in chosen]
        return torch.stack(routes, dim=1)[:-1].sort().values

    return model, routes_of
