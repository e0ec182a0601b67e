"""Loads and checks the function named by `reward.function`. Called by reward workers and by early checks of the setting.

A reward function has the usual signature:

    def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": float, ...}

It may be `async def`; a worker then scores many responses at once. `extra_info` arrives as JSON: keys are text, bytes are
base64, dates and decimals are their `str`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeGuard

from tlt_megatron.config.extensions import load_extension

RawScore = float | Mapping[str, object]
AsyncRewardFunction = Callable[..., Awaitable[RawScore]]
RewardFunction = Callable[..., RawScore] | AsyncRewardFunction

MAX_ABS_REWARD = 1e6  # the variance of 1e200 overflows, which silently makes advantages 0


def load_reward(spec: str) -> RewardFunction:
    """Return the function that `reward.function` names. ValueError as in `load_extension`."""
    return load_extension("reward.function", spec)


def is_async(function: RewardFunction) -> TypeGuard[AsyncRewardFunction]:
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
