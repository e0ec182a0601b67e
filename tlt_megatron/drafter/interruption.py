"""Giving a training pass up half-way: somebody is asked whether to, at every matrix of the forward and the backward pass.

Used by `trainer.py` for steps of spot sessions, and by the drafter's upkeep when it judges candidates: both must end when the last
rollout does. The one thing to know: the pass
ends by an exception that unwinds it, so nothing of it is left but a gradient buffer that the next step clears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class PassAbandoned(Exception):
    """Unwinds a pass that is not to be finished."""


@contextmanager
def interruptible(model: nn.Module, should_abandon: Callable[[], bool] | None) -> Iterator[None]:
    """Passes of `model` in the body raise PassAbandoned soon after `should_abandon` says yes; without it, never.

    It is asked dozens of times per pass, between kernels, so it must be quick.
    """
    if should_abandon is None:
        yield
        return

    def ask(_: Tensor | None = None) -> None:
        if should_abandon():
            raise PassAbandoned

    def on_output(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        ask()
        if output.requires_grad:
            output.register_hook(ask)

    matrices = (module for module in model.modules() if isinstance(module, nn.Linear))
    handles = [module.register_forward_hook(on_output) for module in matrices]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
