"""Reads the files of a run folder, which a run may still append to, or only their ends.

ValueError names a file that no run writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlt_megatron.saved_files import MAX_BYTES, open_regular, parse_object


def read_text(path: Path, max_bytes: int | None = None) -> str:
    """Return the text, "" without the file.

    A file of more than `max_bytes` gives whole lines of its end. Without `max_bytes`, ValueError
    for a file that is too large to be read as a whole.
    """
    if not path.exists():
        return ""
    with open_regular(path) as file:
        size = path.stat().st_size
        if max_bytes is None and size > MAX_BYTES:
            raise ValueError(f"{path}: has {size:,} bytes: must have at most {MAX_BYTES:,}")
        start = 0 if max_bytes is None else max(size - max_bytes, 0)
        file.seek(start)
        text = file.read().decode(errors="replace")
    return text.partition("\n")[2] if start else text


def read_lines(path: Path, max_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; [] without the file.

    A last line without its end is an interrupted write and is left out.
    A file of more than `max_bytes` gives only whole lines of its end.
    """
    return [parse_object(path, line) for line in read_text(path, max_bytes).split("\n")[:-1]]
