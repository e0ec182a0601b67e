"""The pages of runs in progress, and words that change when a page would."""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from tools.run_report.data import RunData, read_run
from tools.run_report.files import errors_named
from tools.run_report.page import Live, render_comparison, render_page, render_states
from tools.run_report.panels import build_comparison, build_panels
from tools.run_report.responses import NUM_SHOWN, read_responses
from tools.run_report.running import Running, State, describe_end, is_over, read_ranks
from tools.run_report.trace import Trace

Links = Sequence[tuple[str, str]]
_FILES = ("config.yaml", "metrics.jsonl", "speculation.jsonl", "summary.json")
_NUM_TRACES = 8  # ranks whose files show that a step has ended


class LiveRun:
    """A run folder and its page."""

    def __init__(self, path: Path, name: str = "") -> None:
        """`name` is by default that of the folder."""
        self.path = path
        self.name = name or path.resolve().name
        self._trace = Trace(path / "timeline")
        self._lock = threading.RLock()  # of what follows: several pages may be asked for at once
        self._run: RunData | None = None  # as last read
        self._error = ""

    def version(self) -> str:
        """Return a word that changes with the sizes and times of the files that the page shows."""
        files = [self.path / name for name in _FILES]
        files += sorted((self.path / "timeline").glob("rank_*.jsonl"))[:_NUM_TRACES]
        files += sorted((self.path / "rollouts").glob("step_*.jsonl"))[-1:]
        return f"{zlib.crc32(repr([_stamp(file) for file in files]).encode()):08x}"

    def read(self) -> RunData:
        """Return the newest data, without the trace's.

        It is empty if a file is broken, which `states` then names.
        """
        with self._lock:
            self._error = ""
            try:
                self._run = read_run(self.path, self._trace, self.name)
            except ValueError as error:
                self._refuse(error)
            return self._run or RunData(name=self.name)

    def page(self, links: Links) -> str:
        """Return the HTML; `links` are address and name of every page of the server."""
        version = self.version()  # before reading: a later change makes the page reload again
        with self._lock:
            run = self.read()
            try:
                with errors_named(self.path):
                    self._trace.scan()
                    panels = build_panels(run, None) if run.rows else []
                    responses = read_responses(self.path, NUM_SHOWN)
                    live = Live(version=version, states=self.states(), links=links)
                    return render_page(run, panels, responses, live)
            except ValueError as error:
                self._refuse(error)
            live = Live(version=version, states=self.states(), links=links)
            return render_page(RunData(name=self.name), [], [], live)

    def _refuse(self, error: ValueError) -> None:
        """Show nothing of the run but the error."""
        self._run, self._error = RunData(name=self.name), f"cannot be shown: {error}"
        self._trace = Trace(self.path / "timeline")

    def states(self) -> list[State]:
        """Return what the page shows anew every few seconds, although its version is the same."""
        with self._lock:
            run = self._run or self.read()
            error = self._error
        try:
            with errors_named(self.path):
                state = self._state(run)
                render_states([state])  # files of ranks may hold anything
        except ValueError as broken:
            state, error = State(name=self.name, sentence=""), f"cannot be shown: {broken}"
        return [replace(state, sentence=error)] if error else [state]

    def _state(self, run: RunData) -> State:
        ranks = read_ranks(self.path)
        steps, seconds = run.series("timing_s/step")
        sentence = "No RL step is done yet."
        if steps:
            written = time.localtime(_stamp(self.path / "metrics.jsonl")[2] / 1e9)
            num_steps = run.config.get("run", {}).get("num_steps", "?")
            sentence = (
                f"{steps[-1]} of {num_steps} RL steps are done, at {time.strftime('%X', written)}."
            )
        if is_over(self.path):
            return State(name=self.name, sentence=f"The run has ended. {sentence}")
        if alarm := describe_end(self.path, ranks):
            return State(name=self.name, sentence=sentence.replace(" yet", ""), alarm=alarm)
        if not steps:
            sentence = f"The run is starting. {sentence}"
        if not ranks:
            return State(name=self.name, sentence=sentence)
        last_done = int(steps[-1]) if steps else 0
        now = Running(ranks=ranks, now_s=time.time(), last_done=last_done)
        known = [value for value in seconds if value is not None]
        timeout_s = run.config.get("run", {}).get("group_timeout_s")
        alarm = now.hang(
            median(known) if known else math.inf,
            timeout_s if isinstance(timeout_s, int | float) else math.inf,
        )
        return State(name=self.name, sentence=sentence, now=now, alarm=alarm)


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


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except OSError:  # absent, or a link to itself
        return path.name, 0, 0
    return path.name, stat.st_size, stat.st_mtime_ns
