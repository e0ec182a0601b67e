"""Carries a user's function from a script or notebook to the reward workers of a run, as it is:
with its defaults, closure and the values that it uses, by cloudpickle.

`api.Trainer` saves it beside the run folder, and a worker loads it by the file that is written with
it. So importing the script, which would run it, is not needed.
"""

from __future__ import annotations

import functools
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

_PROGRAM = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
_SOURCE = '''"""The reward function of a script or notebook, as it was when its run was started."""

from pathlib import Path

from tlt_megatron.rewards.carried_function import load_function

reward = load_function(Path(__file__))
'''


class _Pickler(cloudpickle.CloudPickler):
    """CloudPickler that takes cached functions too, which pickle knows by name alone."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    return functools.lru_cache(**parameters)(function)


def save_function(function: Callable[..., Any], file: Path, environment: Mapping[str, str]) -> str:
    """Write `file`, and the function beside it as .pkl. Return `file.py:reward`, as settings name
    it.

    ValueError if no other process with `environment` can load the function.
    """
    name = f"reward={getattr(function, '__qualname__', function)}"
    if not callable(function):
        raise ValueError(f"{name}: must be a function or another object that can be called")
    try:
        content = io.BytesIO()
        _Pickler(content).dump(function)
    except Exception as error:  # any object that the function uses may raise it
        raise ValueError(
            f"{name}: uses what cannot be copied to another process: {error}. Put the function and what it uses into a"
            " file of its own, and name it in reward.function"
        ) from error
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_SOURCE, encoding="utf-8")
    carried = file.with_suffix(".pkl")
    carried.write_bytes(content.getvalue())
    loaded = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(carried)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if loaded.returncode:
        reason = loaded.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"{name}: another process cannot load it: {reason}")
    return f"{file.resolve()}:reward"


def load_function(file: Path) -> Callable[..., Any]:
    """Return the function that `save_function` wrote with `file`."""
    return pickle.loads(file.with_suffix(".pkl").read_bytes())
