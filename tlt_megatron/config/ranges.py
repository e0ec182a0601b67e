"""Range checks for settings. The error names key, value and what is allowed in one line. Used by the sections."""

from __future__ import annotations


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise ValueError unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}={value!r}: must be {allowed}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    require(value in allowed, name, value, "one of " + ", ".join(allowed))
