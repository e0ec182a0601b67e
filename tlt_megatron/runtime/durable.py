"""Writes files that survive a crash: flushed to disk, replaced atomically, with the access rights
of the user's umask.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt_megatron.saved_files import MAX_BYTES, is_number, open_regular

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


def sync_path(path: Path) -> None:
    """Flush one file, or the names in one folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush `folder` and everything in it."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield the empty folder `<path>.tmp`. If the body succeeds, it is flushed and replaces `path`.

    After a crash `path` is the whole old or the whole new folder, or the whole old one is
    `<path>.old`, which the next call puts back.
    """
    temporary, old = (path.with_name(path.name + ending) for ending in (".tmp", ".old"))
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_tree(temporary)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # frees the space if the disk is full
        raise
    sync_path(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` with `text`.

    A reader finds the whole old or the whole new content, also after a crash.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    sync_path(temporary)
    temporary.replace(path)
    sync_path(path.parent)


def has_step(row: Mapping[str, object]) -> bool:
    """Return whether an object is a row of a step."""
    return type(row.get("step")) is int


def is_metrics_row(row: Mapping[str, object]) -> bool:
    """Return whether an object is a row of metrics.jsonl: finite numbers, or null, of a step."""
    return has_step(row) and all(each is None or is_number(each) for each in row.values())


def read_json_lines(
    path: Path, fits: Callable[[Mapping[str, object]], bool]
) -> list[dict[str, Any]]:
    """Return the rows of a file: the objects for which `fits` is true.

    Other lines that are not empty are counted and logged; a killed run tears one. ValueError if the
    file is not a regular one.
    """
    rows, num_others = [], 0
    with open_regular(path) as file:
        while line := file.readline(MAX_BYTES):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and fits(row):
                rows.append(row)
            elif line.strip():
                num_others += 1
    if num_others:
        log.warning(
            "%s: left out %d lines that are no rows (a killed run may leave one)", path, num_others
        )
    return rows


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the access rights of a normal new file. safetensors itself uses
    0600.

    OSError if it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()  # takes umask and default access lists; reading the umask would change it for all threads
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None
    path.chmod(mode)
