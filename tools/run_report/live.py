"""The pages of runs in progress, and words that change when a page would."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

from tlt_megatron.saved_files import errors_named
from tools.run_report.data import RunData, read_run
from tools.run_report.page import Live, render, render_states
from tools.run_report.running import State, read_state
from tools.run_report.trace import Trace

Links = Sequence[tuple[str, str]]
_FILES = ("config.yaml", "metrics.jsonl", "summary.json")
_NUM_TRACES = 8  # ranks whose files show that a step has ended


class LiveRun:
    """A run folder and its page."""

    def __init__(self, path: Path, name: str = "") -> None:
        """`name` is by default that of the folder."""
        self.path = path
        self.name = name or path.resolve().name
        self._trace = Trace(path / "timeline")
        self._lock = threading.Lock()  # guards the trace: several pages may be asked for at once
        self._run: RunData | None = None  # as last read
        self._error = ""  # on the newest page

    def version(self) -> str:
        """Return a word that changes with the sizes and times of the files that the page shows."""
        files = [self.path / name for name in _FILES]
        files += sorted((self.path / "timeline").glob("rank_*.jsonl"))[:_NUM_TRACES]
        files += sorted((self.path / "speculation").glob("rank_*.jsonl"))[:_NUM_TRACES]
        files += sorted((self.path / "rollouts").glob("step_*.jsonl"))[-1:]
        stats = [file.stat() for file in files if file.exists()]
        return f"{zlib.crc32(repr([(s.st_size, s.st_mtime_ns) for s in stats]).encode()):08x}"

    def read(self) -> RunData:
        """Return the newest data. It is empty if a file is broken."""
        try:
            self._run, self._error = read_run(self.path, self._trace, self.name), ""
        except ValueError as error:
            self._run, self._error = RunData(self.path, self.name), f"cannot be shown: {error}"
        return self._run

    def page(self, links: Links) -> str:
        """Return the HTML; `links` are address and name of every page of the server.

        A page that cannot be shown says why, and nothing else of the run.
        """
        version = self.version()  # before reading: a later change makes the page reload again
        with self._lock:
            run = self.read()
            try:
                return render([run], live=Live(version, self.states(), links))
            except ValueError as error:
                self._trace = Trace(self.path / "timeline")
                self._error = f"cannot be shown: {error}"
                self._run = run = RunData(self.path, self.name)
                return render([run], live=Live(version, self.states(), links))

    def states(self) -> list[State]:
        """Return what the page shows anew every few seconds, although its version is the same."""
        run = self._run or self.read()
        try:
            with errors_named(self.path):
                state = read_state(self.path, run)
                render_states([state])  # files of ranks may hold anything
        except ValueError as error:
            return [State(name=self.name, sentence=f"cannot be shown: {error}")]
        return [State(name=self.name, sentence=self._error)] if self._error else [state]


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
        version, runs = self.version(), [run.read() for run in self._runs]
        return render(runs, live=Live(version, self.states(), links))

    def states(self) -> list[State]:
        """Return the states of all runs."""
        return [state for run in self._runs for state in run.states()]
