"""Reads files that somebody else may have made: of a run, of a checkpoint, of a model.

Such a file may be a pipe, which would block, or be larger than the memory, and its content may be
anything. So every reader of one begins here. ValueError names the file.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 30  # the largest file that is read whole; a manifest of 10,000 files has 1.5 MB
# What values of wrong types, sizes and names raise, and a collective does not.
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, AssertionError)
_MAX_CHARACTERS = 400  # that a message shows of a text from a file


def printable(text: str) -> str:
    """Return a text of elsewhere with a space for each control character, which a terminal would
    obey.
    """
    return "".join(each if each.isprintable() else " " for each in text)


def one_line(text: object, limit: int = _MAX_CHARACTERS) -> str:
    """Return a text of elsewhere as one printable line, cut after `limit` characters."""
    line = " ".join(printable(str(text)[: 4 * limit]).split())
    return line if len(line) <= limit else f"{line[:limit]}..."


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read. ValueError for a pipe, a device or a folder; OSError as of `open`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe blocks here
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content. ValueError for a file of more than `max_bytes`; OSError as of `open`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{path}: has {size:,} bytes: must have at most {max_bytes:,}")
        return file.read()


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of `read_bytes`. ValueError also if it is not UTF-8."""
    content = read_bytes(path, max_bytes)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        return parse_object(path, read_text(path))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse_object(path: object, text: str) -> dict[str, Any]:
    """Return a JSON object of the file, or other source, `path`; its numbers may be NaN."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # one: brackets nested 10,000 deep
        raise ValueError(f"{path}: cannot be read as JSON: {text[:40]!r}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


def parse_torch(path: object, data: bytes) -> Any:
    """Return the tensors and plain values that `torch.save` wrote into `data`, of the file `path`.

    Nothing in it is run. ValueError in one line for anything else.
    """
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make torch.load raise any type
        # torch's own text advises to run what is in the file
        found = re.search(r"(?:WeightsUnpickler error: |Trying to load )(.*)", str(error))
        reason = found[1] if found else error
        raise ValueError(f"{path} is not loaded: {one_line(reason)}") from error


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text.

    ValueError for a key that stands twice in an object, because a value would be lost.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {first_twin([key for key, _ in pairs])!r} stands twice")
    return found


def first_twin(names: Sequence[str]) -> str:
    """Return the first name that stands twice, or nothing."""
    return next((name for name in names if names.count(name) > 1), "")


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # NaN is not


def amount(value: object) -> float:
    """Return a number of JSON. ValueError unless it is finite and not negative."""
    if not is_number(value) or value < 0:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{one_line(repr(value), 40)} must be a number >= 0")
    return value  # pyright: ignore[reportReturnType]


@contextmanager
def errors_named(
    path: Path, kinds: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Raise ValueError of one line with the file or folder for any error that its content causes.

    A body that talks to other ranks gives `MALFORMED` as `kinds`: the loss of a rank is no fault of
    the file.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        said = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{path}: is not as a run writes it: {said}") from error
