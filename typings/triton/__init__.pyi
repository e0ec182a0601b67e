"""Lets pyright see the same Triton whether or not the package is installed: anything."""

from typing import Any

def __getattr__(name: str) -> Any: ...
