"""Names a user's function so that another process can import it: the place of its module, or a copy
of its source.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any


def place_of(function: Callable[..., Any], copy: Path) -> str:
    """Return `file.py:name` or `module:name` for `function`, as settings name it.

    A function of the running script or notebook is copied to the file `copy`, because importing a
    script runs it. ValueError for one that cannot be imported or copied.
    """
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not isinstance(function, FunctionType) or function.__closure__ or "<" in name:
        raise ValueError(
            f"reward={function!r}: must be a function at the top level of a module, script or notebook"
        )
    if module != "__main__":
        file = inspect.getsourcefile(function)
        return f"{Path(file).resolve()}:{name}" if file else f"{module}:{name}"
    lines = {"": "from __future__ import annotations"}  # so a copy needs no names of annotations
    _add(function, lines)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text("\n\n".join(lines.values()) + "\n", encoding="utf-8")
    return f"{copy.resolve()}:{name}"


def _add(function: FunctionType, lines: dict[str, str]) -> None:
    """Add the source of `function` to `lines`, after that of what it uses, by name."""
    linecache.checkcache()
    try:
        source = textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError) as error:
        raise ValueError(f"reward={function.__name__}: has no source here: {error}") from error
    lines[function.__name__] = ""  # it may call itself
    # Code of the source has the names of its defaults too, and none of its annotations, as here.
    for name in sorted(_names(compile(source, function.__name__, "exec"))):
        if name in lines or name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            lines[name] = f"import {value.__name__} as {name}"
        elif place := _import_of(value):
            lines[name] = f"{place} as {name}"
        elif isinstance(value, FunctionType) and value.__module__ == "__main__":
            _add(value, lines)
        elif _is_plain(value):
            lines[name] = f"{name} = {value!r}"
        elif not hasattr(builtins, name):  # a notebook has an `open` and an `exit` of its own
            raise ValueError(
                f"reward={function.__name__}: uses {name}, a {type(value).__name__} that cannot be copied to another process:"
                " put the function and what it uses into a file of its own, and import it"
            )
    del lines[function.__name__]  # behind what it uses
    lines[function.__name__] = source


def _names(code: CodeType) -> set[str]:
    """Return the global names that code reads, which are not those of attributes."""
    steps = dis.get_instructions(code)
    own = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _import_of(value: object) -> str:
    """Return the import of what another module holds under its own name; "" for anything else."""
    home, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if home in (None, "__main__") or name is None:
        return ""
    is_there = getattr(sys.modules.get(home), name, None) is value
    return f"from {home} import {name}" if is_there else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return value is None or isinstance(value, str | bytes | int | float | bool)
