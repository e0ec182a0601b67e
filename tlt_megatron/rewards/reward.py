"""Loads and checks the functions of `reward.function`, and reads their results. For reward workers.

A reward function has the usual signature:

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0  # or {"score": 1.0, ...}

Further numbers in the dict become metrics. It may be `async def`; a worker then scores many
responses at once. `extra_info` arrives as JSON: keys are text, bytes are base64, dates and decimals
are their `str`.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Mapping, Sequence

from tlt_megatron.config.extensions import load_extension
from tlt_megatron.runtime.log import encodable

ENVIRONMENT = "environment"  # the function that returns the rewards of an environment
MAX_ABS_REWARD = 1e6  # the variance of 1e200 overflows, which silently makes advantages 0


def name_setting(weights: Mapping[str, float]) -> str:
    """Return the setting that names these functions, with its value, for messages."""
    (spec, weight), *others = weights.items()
    return f"reward.function={spec if not others and weight == 1 else dict(weights)!r}"


def is_async(function: object) -> bool:
    """Return whether a call of `function` gives an awaitable; also True for an object with `async
    def __call__`.
    """
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def read_result(result: object) -> tuple[float, dict[str, float]]:
    """Return the reward in a function's result, and the further numbers in it by name.

    A result is a number, or a dict with the number under "score". A further entry may be a number,
    text (skipped with a warning, once) or None (skipped). ValueError names the entry if it is
    anything else or not finite, or for a score of more than `MAX_ABS_REWARD` in absolute value.
    """
    if not isinstance(result, Mapping):
        return read_number("score", result, MAX_ABS_REWARD), {}
    if "score" not in result:
        raise ValueError(f"the result {result!r} has no 'score'")
    details = {}
    for key, value in result.items():
        if isinstance(value, str) and key != "score":  # shown once, in the log of the rank
            warnings.warn(
                f"the entry {key!r} of a reward is text, so it is no metric", stacklevel=1
            )
        elif value is not None or key == "score":
            limit = MAX_ABS_REWARD if key == "score" else sys.float_info.max
            details[encodable(str(key))] = read_number(str(key), value, limit)
    return details.pop("score"), details


def read_number(key: str, value: object, limit: float) -> float:
    """Return a number of a user's function. ValueError if it is none, or beyond `limit`."""
    try:
        number = float(value)  # type: ignore[arg-type]  # numpy and torch scalars pass as well
    except OverflowError:  # an integer beyond float64
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # the last from a tensor of several numbers
        number = math.nan
    if isinstance(value, str | bytes | bytearray) or math.isnan(number) or abs(number) > limit:
        raise ValueError(
            f"{key}={repr(value)[:80]}: must be a finite number from {-limit:g} to {limit:g}"
        )
    return number


class WeightedRewards:
    """All functions of a run as one. `weights` has the weight of each function by its setting.

    The reward is the weighted sum of their scores. If there are several, the score of each is one
    of the further numbers, under the function's name, which also goes before the names of its own
    further numbers. An error names the function whose result cannot be read.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.is_async = False
        self._parts = []
        for spec, weight in weights.items():
            function = load_extension("reward.function", spec)
            self.is_async |= is_async(function)
            self._parts.append((spec, weight, function))

    async def score(
        self, environment: Mapping[str, object], **row: object
    ) -> tuple[float, dict[str, float]]:
        """Return the reward of a response and the further numbers. Several functions run one after
        another.

        `environment` has the rewards of a conversation. It waits only for async functions.
        """
        results = []
        for spec, _, function in self._parts:
            result = function(**(environment if spec == ENVIRONMENT else row))
            result = await result if inspect.isawaitable(result) else result
            try:
                results.append(read_result(result))
            except ValueError as error:
                raise ValueError(f"the result of {spec!r}: {error}") from error
        return self._sum(results)

    def _sum(
        self, results: Sequence[tuple[float, dict[str, float]]]
    ) -> tuple[float, dict[str, float]]:
        if len(results) == 1 and self._parts[0][1] == 1:
            return results[0]
        parts, details = [], {}
        for (spec, weight, _), (score, further) in zip(self._parts, results, strict=True):
            name = spec.rpartition(":")[2]
            parts.append(weight * score)
            details |= {name: score} | {f"{name}/{key}": value for key, value in further.items()}
        return read_number("score", math.fsum(parts), MAX_ABS_REWARD), details
