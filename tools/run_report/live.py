"""The pages of runs in progress: rendered again when files of the run have changed."""

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

_FILES = ("config.yaml", "metrics.jsonl", "speculation.jsonl", "summary.json")
_NUM_TRACES = 8  # ranks whose files show that a step has ended
_MARKS = ("lock", "config.yaml", "metrics.jsonl")  # a run has one of these from its start


class LivePage:
    """A page that is rendered again when files have changed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._page = ("", "")  # version, HTML

    def page(self, links: Sequence[tuple[str, str]]) -> str:
        """Return the HTML; `links` are address and name of every page of the server."""
        with self._lock:
            version = self.version()  # before reading: a later change makes the page reload again
            if self._page[0] != version:
                self._page = (version, self._render(version, links))
            return self._page[1]

    def version(self) -> str:
        """Return a word that changes with the sizes and times of the files that the page shows."""
        raise NotImplementedError

    def _render(self, version: str, links: Sequence[tuple[str, str]]) -> str:
        raise NotImplementedError


class LiveRun(LivePage):
    """The page of a run folder. ValueError for a folder that is no run."""

    def __init__(self, path: Path) -> None:
        if not any((path / mark).is_file() for mark in _MARKS):
            raise ValueError(f"{path}: is no run folder: must hold one of {', '.join(_MARKS)}")
        super().__init__(path.resolve().name)
        self.path = path
        self._trace = Trace(path / "timeline")
        self._reading = threading.Lock()

    def version(self) -> str:
        files = [self.path / name for name in _FILES]
        files += sorted((self.path / "timeline").glob("rank_*.jsonl"))[:_NUM_TRACES]
        files += sorted((self.path / "rollouts").glob("step_*.jsonl"))[-1:]
        return f"{zlib.crc32(repr([_stamp(file) for file in files]).encode()):08x}"

    def read(self) -> RunData:
        """Return the newest data. ValueError for a broken file."""
        with self._reading:
            return read_run(self.path, self._trace)

    def _render(self, version: str, links: Sequence[tuple[str, str]]) -> str:
        try:
            run = self.read()
            state = self._state(run)
            panels = build_panels(run, None) if run.rows else []
            responses = read_responses(self.path, NUM_SHOWN)
        except (ValueError, FileNotFoundError) as error:  # the next change of a file renders anew
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


class LiveComparison(LivePage):
    """The page of several runs side by side."""

    def __init__(self, runs: Sequence[LiveRun]) -> None:
        super().__init__("all runs")
        self._runs = runs

    def version(self) -> str:
        return "".join(run.version() for run in self._runs)

    def _render(self, version: str, links: Sequence[tuple[str, str]]) -> str:
        runs, state = [], ""
        for live in self._runs:
            try:
                runs.append(live.read())
            except (ValueError, FileNotFoundError) as error:
                state += f"{live.name} cannot be shown: {error}. "
        panels = build_comparison(runs)
        return render_comparison(runs, panels, Live(version=version, state=state, links=links))


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return path.name, 0, 0
    return path.name, stat.st_size, stat.st_mtime_ns
