"""Reads numbers of a config.json, with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def read_size(
    hf: Mapping[str, Any], name: str, absent: int | None = None, null: int | None = None
) -> int:
    value = hf.get(name, absent)
    value = null if value is None else value
    if value is None:
        raise ValueError(f"lacks {name}")
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: must be an integer >= 1")
    return value


def read_number(hf: Mapping[str, Any], name: str, absent: float) -> float:
    value = hf.get(name, absent)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}={value!r}: must be a number > 0")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be finite")
    return float(value)
