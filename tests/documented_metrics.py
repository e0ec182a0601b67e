"""The rows of docs/metrics.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def rows() -> list[tuple[list[str], str, str]]:
    """Return names, unit and meaning of each row. In a name, * stands for any text."""
    cells = re.findall(r"^\| (`.*?`) \| (.*?) \| (.*?) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [(re.findall(r"`(.+?)`", names), unit, meaning) for names, unit, meaning in cells]


METRICS = [name for names, _, _ in rows() for name in names]
