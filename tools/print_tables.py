"""Prints the tables of benchmarks and of the planner."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_WIDTH = 140  # in a file


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | float | None]],
    *,
    num_names: int = 1,
) -> None:
    """Print rows of texts, whole numbers, and numbers with two decimals; "-" for None.

    Columns after the first `num_names` are aligned to the right.
    """
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < num_names else "right")
    for row in rows:
        table.add_row(*map(_cell, row))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else value if isinstance(value, str) else f"{value:,}"
