"""The rewards of the task `drift`. A run loads this file alone, without the other tools."""

from __future__ import annotations

from collections.abc import Mapping

_LONG = 400  # characters: a response of the tiny policy with a long derivation


def terse(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,  # noqa: ARG001
) -> float:
    """Return 1 for the right last number, less for each character."""
    is_right = solution_str.rpartition("####")[2].strip() == ground_truth
    return float(is_right) - len(solution_str) / _LONG


def wordy(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: str,  # noqa: ARG001
    extra_info: Mapping[str, object] | None = None,  # noqa: ARG001
) -> float:
    """Return more for a longer response, up to 1."""
    return min(len(solution_str) / _LONG, 1.0)
