"""TLT on Megatron: reasoning-RL training that tames the long tail, as one torchrun program.

from tlt_megatron import Drafter, Engine, Trainer
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tlt_megatron.version import __version__

if TYPE_CHECKING:
    from tlt_megatron.api.drafting import Drafter
    from tlt_megatron.api.text_engine import Completion, Engine
    from tlt_megatron.api.training import FinishedRun, RunStopped, Trainer

__all__ = ["Completion", "Drafter", "Engine", "FinishedRun", "RunStopped", "Trainer", "__version__"]
_MODULES = {
    "Completion": "text_engine",
    "Drafter": "drafting",
    "Engine": "text_engine",
    "FinishedRun": "training",
    "RunStopped": "training",
    "Trainer": "training",
}


def __getattr__(name: str) -> object:
    """Import a part of the API when it is used: the launcher checks settings without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"tlt_megatron.api.{_MODULES[name]}"), name)
