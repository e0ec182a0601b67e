"""The built-in reward function `none`: every response scores 0. Reward workers load it.

The policy then learns from the reference alone (`algorithm.distill_coef`).
"""

from __future__ import annotations

from collections.abc import Mapping


def score_none(
    data_source: str,  # noqa: ARG001
    solution_str: str,  # noqa: ARG001
    ground_truth: str,  # noqa: ARG001
    extra_info: Mapping[str, object] | None = None,  # noqa: ARG001
) -> float:
    """Return 0.0."""
    return 0.0
