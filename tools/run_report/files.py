"""Opens and parses the files of a run folder, which may hold anything.

ValueError names a file that no run writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Raise ValueError with the file or folder for any error that a broken file of a run causes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        kind = type(error).__name__
        raise ValueError(f"{path}: is not as a run writes it: {kind}: {error}") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. ValueError for a pipe or a device: to read it could last forever."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is no regular file")
    return path.open("rb")


def read_text(path: Path, max_bytes: int | None = None) -> str:
    """Return the text, "" without the file.

    Of a file of more than `max_bytes`, only whole lines of its end.
    """
    if not path.exists():
        return ""
    with open_regular(path) as file:
        start = 0 if max_bytes is None else max(path.stat().st_size - max_bytes, 0)
        file.seek(start)
        text = file.read().decode(errors="replace")
    return text.partition("\n")[2] if start else text


def read_lines(path: Path, max_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; [] without the file.

    A last line without its end is an interrupted write and is left out.
    Of a file of more than `max_bytes` only whole lines of its end are read.
    """
    return [parse_object(path, line) for line in read_text(path, max_bytes).split("\n")[:-1]]


def parse_object(path: Path, text: str) -> dict[str, Any]:
    """Return a JSON object of the file `path`; its numbers may be NaN."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {text[:40]!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold an object, not a {type(value).__name__}")
    return value


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # NaN is not
