"""What a value may be: the ranges that annotate settings, the base of their sections, and numbers
of a config.json. An error names the key, the value and what is allowed.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple


class Range(NamedTuple):
    """What a field may hold: a test, and its description in error messages."""

    holds: Callable[[Any], bool]
    allowed: str


def one_of(*values: str) -> Range:
    """Return the range of a field with named values."""
    return Range(lambda value: value in values, "one of " + ", ".join(values))


NonNegativeInt = Annotated[int, Range(lambda value: value >= 0, ">= 0")]
Count = Annotated[int, Range(lambda value: 0 <= value < 2**63, "in [0, 2**63)")]  # of a file
PositiveInt = Annotated[int, Range(lambda value: value >= 1, ">= 1")]
Seed = Annotated[int, Range(lambda value: 0 <= value < 2**32, "in [0, 2**32)")]
NonNegative = Annotated[float, Range(lambda value: value >= 0, ">= 0")]
Positive = Annotated[float, Range(lambda value: value > 0, "> 0")]
Fraction = Annotated[float, Range(lambda value: 0 < value <= 1, "in (0, 1]")]
Unit = Annotated[float, Range(lambda value: 0 <= value <= 1, "in [0, 1]")]


class Section:
    """A section of settings, a frozen dataclass. `SpotSection` is the section `spot`.

    Construction raises ValueError, which names key, value and what is allowed, for a field outside
    its range.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for key, ranges in _ranges(type(self)).items():
            for holds, allowed in ranges:
                self.require(holds(getattr(self, key)), key, allowed)
        self.check()

    def check(self) -> None:
        """Check what depends on several fields. Called after the fields' own ranges."""

    def require(self, condition: bool, key: str, allowed: str) -> None:
        """Raise ValueError unless `condition` holds."""
        name = type(self).__name__.removesuffix("Section").lower()
        require(condition, f"{name}.{key}", getattr(self, key), allowed)


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise ValueError unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}={value!r}: must be {allowed}")


def require_divides(number: int, size: int, name: str, whole: str) -> None:
    """Raise ValueError unless `number`, which messages call `name`, divides the size of `whole`."""
    if size % number:
        raise ValueError(f"{name} does not divide {whole}")


def read_size(
    hf: Mapping[str, Any],
    name: str,
    absent: int | None = None,
    null: int | None = None,
    most: int = 2**31,
) -> int:
    """Return a size of a config.json: `absent` where it lacks the key, `null` where that is null.

    ValueError if there is none.
    """
    value = hf.get(name, absent)
    value = null if value is None else value
    if value is None:
        raise ValueError(f"lacks {name}")
    rule = (
        f"an integer in [1, {most}]" if type(value) is int and value > most else "an integer >= 1"
    )
    require(type(value) is int and 1 <= value <= most, name, value, rule)
    return value


def read_number(hf: Mapping[str, Any], name: str, absent: float) -> float:
    """Return a number of a config.json: `absent` where it lacks the key."""
    value = hf.get(name, absent)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and value > 0, name, value, "a number > 0")
    require(math.isfinite(value), name, value, "finite")
    return float(value)


def read_flag(hf: Mapping[str, Any], name: str, absent: bool) -> bool:
    """Return a flag of a config.json: `absent` where it lacks the key."""
    value = hf.get(name, absent)
    require(isinstance(value, bool), name, value, "true or false")
    return value


@functools.cache
def _ranges(section: type) -> dict[str, list[Range]]:
    hints = typing.get_type_hints(section, include_extras=True)
    notes = {key: getattr(hint, "__metadata__", ()) for key, hint in hints.items()}
    return {key: [n for n in found if isinstance(n, Range)] for key, found in notes.items()}
