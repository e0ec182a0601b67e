"""TLT on Megatron: reasoning-RL training that tames the long tail, as one torchrun program.

from tlt_megatron import Drafter, Engine, Trainer
from tlt_megatron import Environment, Step, ToolCall, Turn
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tlt_megatron.version import __version__

if TYPE_CHECKING:
    from tlt_megatron.api.drafting import Drafter
    from tlt_megatron.api.text_engine import Completion, Engine
    from tlt_megatron.api.training import FinishedRun, RunStopped, Trainer
    from tlt_megatron.rewards.environment import Environment, Step, ToolCall, Turn

__all__ = [
    "Completion",
    "Drafter",
    "Engine",
    "Environment",
    "FinishedRun",
    "RunStopped",
    "Step",
    "ToolCall",
    "Trainer",
    "Turn",
    "__version__",
]
_MODULES = {
    "api.drafting": ("Drafter",),
    "api.text_engine": ("Completion", "Engine"),
    "api.training": ("FinishedRun", "RunStopped", "Trainer"),
    "rewards.environment": ("Environment", "Step", "ToolCall", "Turn"),
}


def __getattr__(name: str) -> object:
    """Import a part of the API when it is used: the launcher checks settings without torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"tlt_megatron.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
