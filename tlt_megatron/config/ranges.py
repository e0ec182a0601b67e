"""The base of the settings' sections and the ranges that annotate their fields."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple


class Range(NamedTuple):
    """What a field may hold: a test, and its description in error messages."""

    holds: Callable[[Any], bool]
    allowed: str


def one_of(*values: str) -> Range:
    """Return the range of a field with named values."""
    return Range(lambda value: value in values, "one of " + ", ".join(values))


NonNegativeInt = Annotated[int, Range(lambda value: value >= 0, ">= 0")]
PositiveInt = Annotated[int, Range(lambda value: value >= 1, ">= 1")]
Seed = Annotated[int, Range(lambda value: 0 <= value < 2**32, "in [0, 2**32)")]
NonNegative = Annotated[float, Range(lambda value: value >= 0, ">= 0")]
Positive = Annotated[float, Range(lambda value: value > 0, "> 0")]
Fraction = Annotated[float, Range(lambda value: 0 < value <= 1, "in (0, 1]")]
Unit = Annotated[float, Range(lambda value: 0 <= value <= 1, "in [0, 1]")]
Share = Annotated[float, Range(lambda value: 0 <= value < 1, "in [0, 1)")]


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


@functools.cache
def _ranges(section: type) -> dict[str, list[Range]]:
    hints = typing.get_type_hints(section, include_extras=True)
    notes = {key: getattr(hint, "__metadata__", ()) for key, hint in hints.items()}
    return {key: [n for n in found if isinstance(n, Range)] for key, found in notes.items()}
