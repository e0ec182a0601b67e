"""Loads and checks the function named by `reward.function`. Called by reward workers and by early checks of the setting.

A reward function has the usual signature:

    def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": float, ...}

It may be `async def`; a worker then scores many responses at once. `extra_info` arrives as JSON: keys are text, bytes are
base64, dates and decimals are their `str`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType

RawScore = float | Mapping[str, object]
RewardFunction = Callable[..., RawScore | Awaitable[RawScore]]

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
MAX_ABS_REWARD = 1e6  # the variance of 1e200 overflows, which silently makes advantages 0
_BUILTIN_MODULE = "tlt_megatron.rewards.builtin"
_BUILTINS = {"math": "score_math", "exact": "score_exact"}
_ALLOWED = f"{', '.join(_BUILTINS)}, path/to/file.py:function or package.module:function"


def load_reward(spec: str) -> RewardFunction:
    """Find the function that `spec` names and check that it can be called as a reward function.

    ValueError names the spec and what is wrong: no such file, module or function, code that fails on import, not callable,
    wrong parameters.
    """
    if spec in _BUILTINS:
        return getattr(importlib.import_module(_BUILTIN_MODULE), _BUILTINS[spec])
    place, colon, name = spec.rpartition(":")
    if not (colon and place and name):
        raise ValueError(f"reward.function={spec!r}: must be {_ALLOWED}")
    is_file = place.endswith(".py") or "/" in place
    module = _load_file(spec, Path(place)) if is_file else _load_module(spec, place)
    if not hasattr(module, name):
        raise ValueError(f"reward.function={spec!r}: {place} has no function {name!r}")
    function = getattr(module, name)
    _check_callable(spec, function)
    return function


def is_async(function: RewardFunction) -> bool:
    """Return whether a call of `function` gives an awaitable; also True for an object with `async def __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def read_score(result: object) -> float:
    """Return the reward in a reward function's result: a number, or a dict with the number under "score".

    ValueError for anything else, for NaN, and for more than `MAX_ABS_REWARD` in absolute value.
    """
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"the result {result!r} has no 'score'")
        result = result["score"]
    try:
        score = float(result)  # type: ignore[arg-type]  # numpy and torch scalars pass as well
    except OverflowError:  # an integer beyond float64
        score = math.inf
    except (TypeError, ValueError):
        score = math.nan
    if isinstance(result, str) or math.isnan(score) or abs(score) > MAX_ABS_REWARD:
        raise ValueError(
            f"score={repr(result)[:80]}: must be a finite number from {-MAX_ABS_REWARD:g} to {MAX_ABS_REWARD:g}"
        )
    return score


def _load_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"reward.function={spec!r}: no such file: {path.absolute()}")
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"reward.function={spec!r}: {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle search for their module there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"reward.function={spec!r}: {path} fails to load: {error!r}") from error
    return module


def _load_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"reward.function={spec!r}: import {name} fails: {error!r}") from error


def _check_callable(spec: str, function: object) -> None:
    if not callable(function):
        raise ValueError(f"reward.function={spec!r}: {type(function).__name__} is not callable")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise ValueError(
            f"reward.function={spec!r}: has parameters {signature}, "
            f"must accept ({', '.join(ARGUMENTS)}): {error}"
        ) from error
