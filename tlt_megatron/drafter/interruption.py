"""Aborts a forward or backward pass half-way: a callback is asked at every linear layer, and an exception ends the pass.

Used by `trainer.py` for steps of spot sessions, and by `spot/lifecycle.py` when it measures candidates. Both must
end when the last rollout does. An aborted pass leaves only a partly filled gradient buffer, which the next step clears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class PassAbandoned(Exception):
    """Raised inside a pass to abort it."""


@contextmanager
def interruptible(model: nn.Module, should_abandon: Callable[[], bool] | None) -> Iterator[None]:
    """Make passes of `model` in the body raise PassAbandoned soon after `should_abandon` returns True. None: never.

    `should_abandon` is called dozens of times per pass, between kernels, so it must be fast.
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
