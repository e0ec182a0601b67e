"""Runs one item of `tools/gpu_check.py`, in a process of its own: `python -m tools.gpu.one_item
JSON`.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.machine import Machine, NothingRan

_OWN = ("tests", "tools", "launch", "tlt_megatron")  # not packages that may be missing


def main(given: Mapping[str, Any]) -> int:
    """Call the item's function. Write each of its figures at once: those before a hang or a crash
    are kept.
    """
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(given["limit_s"] - 1.0, 0.5))
    machine = Machine(
        is_cpu=given["is_cpu"], is_tiny=given["is_tiny"], scratch=Path(given["scratch"])
    )
    module, _, name = given["function"].partition(":")
    arguments = [given["argument"]] if given["argument"] else []
    end = {"status": "ok"}
    with Path(given["figures"]).open("a", buffering=1, encoding="utf-8") as file:
        try:
            for package in given["needs"]:
                if not _is_there(package):
                    raise ModuleNotFoundError(f"needs {package}", name=package)
            for figures in getattr(importlib.import_module(module), name)(machine, *arguments):
                file.write(json.dumps(figures) + "\n")
        except Exception as error:
            traceback.print_exc()
            end = _end_of(error)
        file.write(json.dumps({"end": end}) + "\n")
    return int(end["status"] == "failed")


def _end_of(error: Exception) -> dict[str, str]:
    """Return status and error. A package that is not installed is no failure."""
    if isinstance(error, NothingRan):
        return {"status": "skipped", "error": str(error)}
    root = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, ModuleNotFoundError) and root not in ("", *_OWN):
        return {"status": "missing", "error": str(error)}
    text = str(error) or repr(traceback.extract_tb(error.__traceback__)[-1].line)
    return {"status": "failed", "error": f"{type(error).__name__}: {text[:2000]}"}


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent
        return False


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what a library does at the end of the process may hang
