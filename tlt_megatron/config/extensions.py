"""The extension points: settings that name code, as a registered name or as an import path.

`check_extension` checks the form of such a setting before anything is imported. `load_extension` imports the object. The owner
of the setting checks that the object fits.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# setting -> registered name -> module:object
REGISTRY: dict[str, dict[str, str]] = {
    "reward.function": {
        "math": "tlt_megatron.rewards.builtin:score_math",
        "exact": "tlt_megatron.rewards.builtin:score_exact",
    },
    "speculation.selector": {
        "cost_model": "tlt_megatron.speculation.cost_model:CostModelSelector",
        "beg_mab": "tlt_megatron.speculation.beg_mab:BegMabSelector",
        "fixed": "tlt_megatron.speculation.selector:FixedSelector",
    },
}


def check_extension(setting: str, spec: str) -> None:
    """Raise ValueError unless `spec` is a registered name of `setting`, `path/to/file.py:name` or `package.module:name`."""
    place, _, name = spec.rpartition(":")
    if spec not in REGISTRY[setting] and not (place and name):
        raise ValueError(
            f"{setting}={spec!r}: must be one of {', '.join(REGISTRY[setting])}, path/to/file.py:name or package.module:name"
        )


def load_extension(setting: str, spec: str) -> Any:
    """Return the object that `spec` names.

    ValueError names the setting, the spec and what is wrong: no such file, module or object, or code that fails on import.
    """
    check_extension(setting, spec)
    place, _, name = REGISTRY[setting].get(spec, spec).rpartition(":")
    is_file = place.endswith(".py") or "/" in place
    if is_file and not Path(place).is_file():
        raise ValueError(f"{setting}={spec!r}: no such file: {Path(place).absolute()}")
    try:
        module = _load_file(Path(place)) if is_file else importlib.import_module(place)
    except Exception as error:  # the module's own code may raise anything
        raise ValueError(f"{setting}={spec!r}: {place} fails to load: {error!r}") from error
    if not hasattr(module, name):
        raise ValueError(f"{setting}={spec!r}: {place} has no {name!r}")
    return getattr(module, name)


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"extension_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError("not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle search for their module there
    spec.loader.exec_module(module)
    return module
