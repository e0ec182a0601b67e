"""Files that survive a crash: flush to the disk, replace at once. Used by whoever writes beside and renames."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Flush one file, or the names in one folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush everything in `folder`, and it itself."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def replace_text(path: Path, text: str) -> None:
    """Give `path` the content `text`: whoever reads it, after a crash too, finds the old or the new one whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    sync_path(temporary)
    temporary.replace(path)
    sync_path(path.parent)
