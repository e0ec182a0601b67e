"""A package whose modules are files of users, wherever they are. `extensions.py` imports them here.

A module's name holds the path of its file. So a process that a user's code starts, such as one of a
pool by spawn, can import the module by its name, as pickle does.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # makes it a package


class _Finder:
    """Finds the file that a module's name holds."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return spec_from_file_location(name, bytes.fromhex(name.rpartition("_")[2]).decode())


sys.meta_path.append(_Finder)


def import_file(path: Path) -> ModuleType:
    """Return the module of a .py file, which a process imports once."""
    if path.suffix != ".py":
        raise ImportError("is not a Python file (.py)")
    stem = re.sub(r"\W", "_", path.stem)
    return importlib.import_module(f"{__name__}.{stem}_{bytes(path).hex()}")
