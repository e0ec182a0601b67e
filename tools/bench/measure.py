"""Shared by the benchmarks: clocks, spread over rounds, a description of the machine, the JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.table import Table


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of this process, so that other load on the machine does not count."""
    started = time.process_time()
    run()
    return time.process_time() - started


def wall_seconds(run: Callable[[], object]) -> float:
    """Return the wall seconds that the caller waits, disk included."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, min and max over rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Return the spread of slow / fast, taken within each round."""
    return spread([s / f for s, f in zip(slow, fast, strict=True)])


def make_table(title: str, *columns: str, num_names: int = 1) -> Table:
    """Return a table of numbers, aligned to the right, after `num_names` columns of names."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < num_names else "right")
    return table


def command_line() -> str:
    """Return the command of this process."""
    return " ".join(["python -m tools.bench", *sys.argv[1:]])


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """Write `result` with the machine and the command that produced it."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    whole = {**result, "machine": machine, "command": command_line()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
