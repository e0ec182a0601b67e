"""The data files of the tiny tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON line for each row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
