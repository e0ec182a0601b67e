"""Reads numbers of a config.json, with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tlt_megatron.config.ranges import require


def read_size(
    hf: Mapping[str, Any], name: str, absent: int | None = None, null: int | None = None
) -> int:
    value = hf.get(name, absent)
    value = null if value is None else value
    if value is None:
        raise ValueError(f"lacks {name}")
    require(type(value) is int and value >= 1, name, value, "an integer >= 1")
    return value


def read_number(hf: Mapping[str, Any], name: str, absent: float) -> float:
    value = hf.get(name, absent)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and value > 0, name, value, "a number > 0")
    require(math.isfinite(value), name, value, "finite")
    return float(value)
