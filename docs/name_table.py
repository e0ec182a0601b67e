"""Writes the tables of docs/coming_from.md from `config/other_names.txt`: python -m
docs.name_table.
"""

from __future__ import annotations

from pathlib import Path

from tlt_megatron.config.other_names import PROJECTS, Row, rows

PAGE = Path(__file__).resolve().parent / "coming_from.md"
_START, _END = "<!-- made by: python -m docs.name_table -->\n", "<!-- end -->\n"


def tables() -> str:
    """Return a table per section: one line per setting, with - where the other trainer has none."""
    by_setting: dict[str, list[Row]] = {}
    for row in rows():
        by_setting.setdefault(row.ours, []).append(row)
    parts: list[str] = []
    section = ""
    for setting, found in by_setting.items():
        if setting.partition(".")[0] != section:
            section = setting.partition(".")[0]
            parts.append(
                f"\n### {section}\n\n| here | {' | '.join(PROJECTS)} |\n|---|---|---|---|\n"
            )
        cells = [", ".join(_names(found, column)) or "-" for column in range(len(PROJECTS))]
        parts.append(f"| `{setting}` | {' | '.join(cells)} |\n")
    return "".join(parts) + "\n"


def _names(found: list[Row], column: int) -> list[str]:
    notes = {row.theirs[column]: row.note for row in found if row.theirs[column]}
    return [f"`{name}` ({note})" if note else f"`{name}`" for name, note in notes.items()]


def with_tables(page: str) -> str:
    """Return the text of the page with the tables in place of those that it has."""
    before, _, rest = page.partition(_START)
    return f"{before}{_START}{tables()}{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
