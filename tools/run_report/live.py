"""The pages of runs in progress, and words that change when a page would."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from tlt_megatron.saved_files import errors_named
from tools.run_report.data import RunData, read_run
from tools.run_report.page import Live, render_comparison, render_page, render_states
from tools.run_report.panels import build_comparison, build_panels
from tools.run_report.responses import read_responses
from tools.run_report.running import Running, State, describe_end, is_over, read_ranks
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
            self._run, self._error = RunData(name=self.name), f"cannot be shown: {error}"
        return self._run

    def page(self, links: Links) -> str:
        """Return the HTML; `links` are address and name of every page of the server.

        A page that cannot be shown says why, and nothing else of the run.
        """
        version = self.version()  # before reading: a later change makes the page reload again
        with self._lock:
            run = self.read()
            try:
                with errors_named(self.path):
                    panels = build_panels(run, None) if run.rows else []
                    responses = read_responses(self.path)
                    live = Live(version=version, states=self.states(), links=links)
                    return render_page(run, panels, responses, live)
            except ValueError as error:
                self._trace = Trace(self.path / "timeline")
                self._run, self._error = RunData(name=self.name), f"cannot be shown: {error}"
        live = Live(version=version, states=self.states(), links=links)
        return render_page(RunData(name=self.name), [], [], live)

    def states(self) -> list[State]:
        """Return what the page shows anew every few seconds, although its version is the same."""
        run = self._run or self.read()
        try:
            with errors_named(self.path):
                state = self._state(run)
                render_states([state])  # files of ranks may hold anything
        except ValueError as error:
            return [State(name=self.name, sentence=f"cannot be shown: {error}")]
        return [State(name=self.name, sentence=self._error)] if self._error else [state]

    def _state(self, run: RunData) -> State:
        ranks = read_ranks(self.path)
        steps, _ = run.series("timing_s/step")
        settings = run.config.get("run", {})
        last_done = steps[-1] if steps else 0
        done = f"{last_done} of {settings.get('num_steps', '?')} RL steps are done."
        if is_over(self.path):
            return State(name=self.name, sentence=f"The run has ended. {done}")
        if alarm := describe_end(self.path):
            return State(name=self.name, sentence=done, alarm=alarm)
        if not steps:
            done = f"The run is starting. {done}"
        now = Running(ranks=ranks, now_s=time.time(), last_done=last_done) if ranks else None
        return State(name=self.name, sentence=done, now=now)


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
        live = Live(version=version, states=self.states(), links=links)
        return render_comparison(runs, build_comparison(runs), live)

    def states(self) -> list[State]:
        """Return the states of all runs."""
        return [state for run in self._runs for state in run.states()]
