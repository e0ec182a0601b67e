"""Environment variables that a child process starts with. Called where another program's engine is launched."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None removes one) inside the block and put them back after it; children started inside keep them."""
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
