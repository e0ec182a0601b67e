"""What the benchmarks share: clocks, spread over rounds, the machine in a line, the JSON file."""

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


def cpu_seconds(run: Callable[[], object]) -> float:
    """Seconds of this process alone: what else the machine does does not count."""
    started = time.process_time()
    run()
    return time.process_time() - started


def wall_seconds(run: Callable[[], object]) -> float:
    """Seconds that the caller waits, for the disk too."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, min and max over rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Spread of slow / fast, taken within each round."""
    return spread([s / f for s, f in zip(slow, fast, strict=True)])


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """Write `result` with the machine and the command that gave it."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    whole = {**result, "machine": machine, "command": " ".join(["python", *sys.argv])}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
