"""Writes the table of docs/coming_from.md from `config/other_names.py`: python -m docs.name_table."""

from __future__ import annotations

from pathlib import Path

from tlt_megatron.config.other_names import NAMES

PAGE = Path(__file__).resolve().parent / "coming_from.md"
_HEAD = "| here | verl | slime | TRL |\n|---|---|---|---|\n"


def table() -> str:
    """Return the table: one row per setting, with - where the other trainer has none."""
    rows = ((ours, *theirs) for ours, theirs in NAMES.items())
    return _HEAD + "".join(
        "| " + " | ".join(f"`{cell}`" if cell else "-" for cell in row) + " |\n" for row in rows
    )


def with_table(page: str) -> str:
    """Return the text of the page with the table in place of the one that it has."""
    before, _, rest = page.partition(_HEAD)
    after = rest.partition("\n\n")[2]
    return f"{before}{table()}\n{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
