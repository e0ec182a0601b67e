"""Reads and checks a run folder for the panels of the report.

ValueError names a file that is broken, or that is absent although the run's settings enabled it. Data that the settings
disabled is None, and the page says so in a sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tools.run_report.trace import Trace

_LIVE_BYTES = 4 << 20  # of a speculation.jsonl that still grows only the end is read
_PASS_FIELDS = ("step", "rank", "strategy", "batch_size", "passes", "seconds", "committed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Everything that the report shows."""

    name: str
    config: dict[str, dict[str, object]] = field(default_factory=dict)
    config_text: str = ""
    summary: dict[str, object] = field(default_factory=dict)
    # metrics by step, ascending; an evaluation is merged in
    rows: list[dict[str, float | None]] = field(default_factory=list)
    trace: Trace | None = field(default=None, compare=False)  # None: the run kept none
    passes: list[dict[str, Any]] | None = None  # rows of speculation.jsonl; None: there is none
    is_live: bool = False  # of a run in progress: files may still be absent

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Return steps and values of a metric where it was written; None for a value that was not finite."""
        rows = [row for row in self.rows if name in row]
        return [int(row["step"] or 0) for row in rows], [row[name] for row in rows]

    def names_after(self, prefix: str) -> list[str]:
        """Return the rests of the names of all metrics that begin with `prefix`, in the order of writing."""
        names = dict.fromkeys(name for row in self.rows for name in row if name.startswith(prefix))
        return [name.removeprefix(prefix) for name in names]

    def is_on(self, section: str) -> bool:
        """Return whether `section`.enabled is set."""
        return bool(self.config.get(section, {}).get("enabled"))


def distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the path of each folder below the one that holds all of them."""
    paths = [path.resolve() for path in run_dirs]
    common = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(common).as_posix() for path in paths]


def read_run(run_dir: Path, live_trace: Trace | None = None, name: str = "") -> RunData:
    """Read the folder. ValueError names a file that is broken, or absent unless the run is in progress.

    `live_trace` is given for a run in progress; only what was added since the last call is scanned.
    `name` is by default that of the folder.
    """
    is_live = live_trace is not None
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such run folder")

    def read(name: str) -> str:
        is_absent = is_live and not (run_dir / name).exists()
        return "{}" if is_absent else _read_text(run_dir / name)

    config_text = read("config.yaml")
    config = _parse_config(run_dir / "config.yaml", config_text)
    trace = None
    if config.get("logging", {}).get("trace", True):
        trace = live_trace or Trace(run_dir / "timeline")
        trace.scan()
    metrics, passes = run_dir / "metrics.jsonl", run_dir / "speculation.jsonl"
    has_metrics = not is_live or (metrics.exists() and "\n" in _read_text(metrics))
    return RunData(
        name=name or run_dir.resolve().name,
        config=config,
        config_text=config_text,
        summary=_parse_object(f"{run_dir / 'summary.json'}", read("summary.json")),
        rows=read_metrics(metrics) if has_metrics else [],
        trace=trace,
        passes=_read_passes(passes, _LIVE_BYTES if is_live else None) if passes.exists() else None,
        is_live=is_live,
    )


def _read_text(path: Path, max_bytes: int | None = None) -> str:
    """Return the text; of a file of more than `max_bytes` only whole lines of its end."""
    try:
        with path.open("rb") as file:
            start = 0 if max_bytes is None else max(path.stat().st_size - max_bytes, 0)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; a run writes it before it ends") from None
    return text.partition("\n")[2] if start else text


def _parse_config(path: Path, text: str) -> dict[str, dict[str, object]]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not YAML ({error})") from None
    if not isinstance(config, dict) or not all(isinstance(s, dict) for s in config.values()):
        raise ValueError(f"{path}: must hold the sections of a run")
    return config


def _parse_object(place: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place}: must hold an object, not a {type(value).__name__}")
    return value


def read_lines(path: Path, max_bytes: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Return places and objects. A last line without its end is an interrupted write and is left out.

    Of a file of more than `max_bytes` only whole lines of its end are read.
    """
    lines = _read_text(path, max_bytes).split("\n")[:-1]
    places = [
        f"{path}:{number}" if max_bytes is None else f"{path}"
        for number in range(1, len(lines) + 1)
    ]
    return [(place, _parse_object(place, line)) for place, line in zip(places, lines, strict=True)]


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Return the metrics of metrics.jsonl by step, ascending. ValueError names a broken line."""
    rows: dict[int, dict[str, float | None]] = {}
    for place, row in read_lines(path):
        step = row.get("step")
        if not isinstance(step, int):
            raise ValueError(f"{place}: step={step!r} must be a whole number")
        for name, value in row.items():
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"{place}: {name}={value!r} must be a number or null")
            rows.setdefault(step, {})[name] = value
    if not rows:
        raise ValueError(f"{path}: holds no step")
    return [rows[step] for step in sorted(rows)]


def _read_passes(path: Path, max_bytes: int | None) -> list[dict[str, Any]]:
    lines = read_lines(path, max_bytes)
    for place, row in lines:
        absent = [name for name in _PASS_FIELDS if name not in row]
        if absent:
            raise ValueError(f"{place}: has no {', '.join(absent)}")
    return [row for _, row in lines]
