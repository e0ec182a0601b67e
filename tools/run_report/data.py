"""Reads and checks a run folder for the panels of the report.

ValueError names a file that is broken.

A run that has not ended, or has failed, lacks files. What is absent is empty or None, and the page
says so in a sentence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tlt_megatron.config.load import parse_sections
from tlt_megatron.saved_files import errors_named, is_number, parse_object
from tlt_megatron.trainer.saving.run_folder import LOCK_FILE
from tools.run_report.alarms import find_alarms
from tools.run_report.files import read_lines, read_text
from tools.run_report.trace import Trace

MARKS = (LOCK_FILE, "config.yaml", "metrics.jsonl")  # a run has one of these from its start
_PASSES_BYTES = 16 << 20  # only the end of a rank's passes is read
_PASSES_FILES = 64  # ranks whose passes are read


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything that the report shows, but responses."""

    folder: Path
    name: str
    config: dict[str, dict[str, object]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # files that are shown as they are, by name
    summary: dict[str, object] = field(default_factory=dict)
    # metrics by step, ascending; an evaluation is merged in
    rows: list[dict[str, float | None]] = field(default_factory=list)
    trace: Trace | None = field(default=None, compare=False)  # None: not read
    passes: list[tuple[str, int, int]] = field(default_factory=list)  # strategy, batch size, number
    alarms: list[str] = field(default_factory=list)

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Return steps and values of a metric where it was written; None for a value that was not
        finite.
        """
        rows = [row for row in self.rows if name in row]
        return [int(row["step"] or 0) for row in rows], [row[name] for row in rows]

    def names_after(self, prefix: str) -> list[str]:
        """Return the rests of the names of all metrics that begin with `prefix`, in the order of
        writing.
        """
        names = dict.fromkeys(name for row in self.rows for name in row if name.startswith(prefix))
        return [name.removeprefix(prefix) for name in names]


def distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the path of each folder below the one that holds all of them."""
    paths = [path.resolve() for path in run_dirs]
    common = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(common).as_posix() for path in paths]


def is_run(path: Path) -> bool:
    """Return whether the folder is that of a run."""
    return any((path / mark).is_file() for mark in MARKS)


def runs_below(folder: Path) -> list[Path]:
    """Return the run itself, or the runs in the folder and in its folders, the newest first.

    ValueError without any.
    """
    if is_run(folder):
        return [folder]
    found = [path for pattern in ("*", "*/*") for path in folder.glob(pattern) if is_run(path)]
    if not found:
        raise ValueError(
            f"{folder}: is no run folder and holds none: a run has {' or '.join(MARKS)}"
        )
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def read_run(run_dir: Path, trace: Trace | None = None, name: str = "") -> RunData:
    """Read the folder. ValueError names a file that is broken.

    A caller that reads a folder again gives the same `trace`, which reads only what was appended.
    `name` is by default that of the folder.
    """
    if not is_run(run_dir):
        raise ValueError(f"{run_dir}: is no run folder: a run has {' or '.join(MARKS)}")
    with errors_named(run_dir):
        texts = {file: read_text(run_dir / file) for file in ("summary.json", "config.yaml")}
        config = _parse_config(run_dir / "config.yaml", texts["config.yaml"])
        trace = trace or Trace(run_dir / "timeline")
        rows = read_metrics(run_dir / "metrics.jsonl")
        return RunData(
            folder=run_dir,
            name=name or run_dir.resolve().name,
            config=config,
            texts=texts,
            summary=parse_object(run_dir / "summary.json", texts["summary.json"] or "{}"),
            rows=rows,
            trace=trace,
            passes=_read_passes(run_dir / "speculation"),
            alarms=find_alarms(rows, config),
        )


def _parse_config(path: Path, text: str) -> dict[str, dict[str, object]]:
    config = parse_sections(text, str(path))
    if not all(isinstance(section, dict) for section in config.values()):
        raise ValueError(f"{path}: must hold the sections of a run")
    return config


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Return the metrics of metrics.jsonl by step, ascending; [] without the file.

    ValueError names a value that is no metric.
    """
    rows: dict[int, dict[str, float | None]] = {}
    for row in read_lines(path):
        step = row.get("step")
        if not isinstance(step, int):
            raise ValueError(f"{path}: step={step!r} must be a whole number")
        for name, value in row.items():
            if value is not None and not is_number(value):
                raise ValueError(f"{path}: {name}={value!r} must be a finite number or null")
            rows.setdefault(step, {})[name] = value
    return [rows[step] for step in sorted(rows)]


def _read_passes(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for path in sorted(folder.glob("rank_?????.jsonl"))[:_PASSES_FILES]:
        with errors_named(path):
            found += [
                (str(row["strategy"]), int(row["batch_size"]), int(row["passes"]))
                for row in read_lines(path, _PASSES_BYTES)
            ]
    return found
