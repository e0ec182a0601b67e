"""The pages of runs in progress, and words that change when a page would."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from tools.run_report.data import RunData, read_run
from tools.run_report.page import Live, render_comparison, render_page
from tools.run_report.panels import build_comparison, build_panels
from tools.run_report.responses import NUM_SHOWN, read_responses
from tools.run_report.trace import Trace

Links = Sequence[tuple[str, str]]
_FILES = ("config.yaml", "metrics.jsonl", "speculation.jsonl", "summary.json")
_NUM_TRACES = 8  # ranks whose files show that a step has ended
_MARKS = ("lock", "config.yaml", "metrics.jsonl")  # a run has one of these from its start


class LiveRun:
    """The page of a run folder. ValueError for a folder that is no run."""

    def __init__(self, path: Path) -> None:
        if not any((path / mark).is_file() for mark in _MARKS):
            raise ValueError(f"{path}: is no run folder: must hold one of {', '.join(_MARKS)}")
        self.path = path
        self.name = path.resolve().name
        self._trace = Trace(path / "timeline")
        self._lock = threading.RLock()  # of the trace: several pages may be asked for at once

    def version(self) -> str:
        """Return a word that changes with the sizes and times of the files that the page shows."""
        files = [self.path / name for name in _FILES]
        files += sorted((self.path / "timeline").glob("rank_*.jsonl"))[:_NUM_TRACES]
        files += sorted((self.path / "rollouts").glob("step_*.jsonl"))[-1:]
        return f"{zlib.crc32(repr([_stamp(file) for file in files]).encode()):08x}"

    def read(self) -> RunData:
        """Return the newest data. ValueError for a broken file."""
        with self._lock:
            return read_run(self.path, self._trace)

    def page(self, links: Links) -> str:
        """Return the HTML; `links` are address and name of every page of the server."""
        version = self.version()  # before reading: a later change makes the page reload again
        try:
            with self._lock:
                run = self.read()
                panels = build_panels(run, None) if run.rows else []
            state = self._state(run)
            responses = read_responses(self.path, NUM_SHOWN)
        except (ValueError, FileNotFoundError) as error:  # the page reloads when a file changes
            run, panels, responses = RunData(name=self.name), [], []
            state = f"cannot be shown: {error}"
        return render_page(run, panels, responses, Live(version=version, state=state, links=links))

    def _state(self, run: RunData) -> str:
        steps = run.series("timing_s/step")[0]
        if not steps:
            return "The run is starting: no RL step is done yet."
        written = time.localtime((self.path / "metrics.jsonl").stat().st_mtime)
        num_steps = run.config.get("run", {}).get("num_steps", "?")
        return f"{steps[-1]} of {num_steps} RL steps are done, at {time.strftime('%X', written)}."


class LiveComparison:
    """The page of several runs side by side."""

    name = "all runs"

    def __init__(self, runs: Sequence[LiveRun]) -> None:
        self._runs = runs

    def version(self) -> str:
        """Return a word that changes with that of any run."""
        return "".join(run.version() for run in self._runs)

    def page(self, links: Links) -> str:
        """Return the HTML, as `LiveRun.page`."""
        version, runs, state = self.version(), [], ""
        for live in self._runs:
            try:
                runs.append(live.read())
            except (ValueError, FileNotFoundError) as error:
                state += f"{live.name} cannot be shown: {error}. "
        live_part = Live(version=version, state=state, links=links)
        return render_comparison(runs, build_comparison(runs), live_part)


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return path.name, 0, 0
    return path.name, stat.st_size, stat.st_mtime_ns
