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

from tlt_megatron.trainer.run_folder import LOCK_FILE, owner_has_ended
from tools.run_report.data import RunData, read_run
from tools.run_report.page import Live, render_comparison, render_page
from tools.run_report.panels import build_comparison, build_panels
from tools.run_report.responses import NUM_SHOWN, read_responses
from tools.run_report.running import Running, State, read_ranks
from tools.run_report.trace import Trace

Links = Sequence[tuple[str, str]]
_SUMMARY = "summary.json"
_FILES = ("config.yaml", "metrics.jsonl", "speculation.jsonl", _SUMMARY)
_NUM_TRACES = 8  # ranks whose files show that a step has ended
_MARKS = (LOCK_FILE, "config.yaml", "metrics.jsonl")  # a run has one of these from its start


class LiveRun:
    """A run folder and its page. ValueError for a folder that is no run."""

    def __init__(self, path: Path, name: str = "") -> None:
        """`name` is by default that of the folder."""
        if not any((path / mark).is_file() for mark in _MARKS):
            raise ValueError(f"{path}: is no run folder: must hold one of {', '.join(_MARKS)}")
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
        """Return the newest data. It is empty if a file is broken, which `states` then names."""
        with self._lock:
            self._error = ""
            try:
                self._run = read_run(self.path, self._trace, self.name)
            except (ValueError, FileNotFoundError) as error:
                self._run, self._error = RunData(name=self.name), f"cannot be shown: {error}"
            return self._run

    def page(self, links: Links) -> str:
        """Return the HTML; `links` are address and name of every page of the server."""
        version = self.version()  # before reading: a later change makes the page reload again
        with self._lock:
            run = self.read()
            try:
                panels = build_panels(run, None) if run.rows else []
                responses = read_responses(self.path, NUM_SHOWN)
            except (ValueError, FileNotFoundError) as error:
                run, panels, responses = RunData(name=self.name), [], []
                self._error = f"cannot be shown: {error}"
            live = Live(version=version, states=self.states(), links=links)
        return render_page(run, panels, responses, live)

    def states(self) -> list[State]:
        """Return what the page shows anew every few seconds, although its version is the same."""
        with self._lock:
            run = self._run or self.read()
            error = self._error
        try:
            ranks = read_ranks(self.path)
        except (ValueError, FileNotFoundError) as broken:
            ranks, error = [], f"cannot be shown: {broken}"
        state = State(name=self.name, sentence=error or self._sentence(run))
        steps, seconds = run.series("timing_s/step")
        last_done = int(steps[-1]) if steps else 0
        now = Running(ranks=ranks, now_s=time.time(), last_done=last_done) if ranks else None
        if self._is_over():
            return [replace(state, sentence=f"The run has ended. {state.sentence}")]
        if owner_has_ended(self.path):
            place = f" {now.place}" if now else ""
            alarm = f"The run has ended without a summary: its process is gone.{place} logs/rank_*.log has the reason."
            return [replace(state, alarm=alarm)]
        if now is None:
            return [state]
        seconds = [value for value in seconds if value is not None]
        timeout_s = run.config.get("run", {}).get("group_timeout_s")
        alarm = now.hang(
            median(seconds) if seconds else math.inf,
            timeout_s if isinstance(timeout_s, int | float) else math.inf,
        )
        return [replace(state, now=now, alarm=alarm)]

    def _is_over(self) -> bool:
        """Return whether the newest run in the folder has written its summary, its last file."""
        summary, lock = _stamp(self.path / _SUMMARY), _stamp(self.path / LOCK_FILE)
        return summary[2] > 0 and summary[2] >= lock[2]

    def _sentence(self, run: RunData) -> str:
        steps = run.series("timing_s/step")[0]
        if not steps:
            return "The run is starting: no RL step is done yet."
        written = time.localtime(_stamp(self.path / "metrics.jsonl")[2] / 1e9)
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
        version, runs = self.version(), [run.read() for run in self._runs]
        live = Live(version=version, states=self.states(), links=links)
        return render_comparison(runs, build_comparison(runs), live)

    def states(self) -> list[State]:
        """Return the states of all runs."""
        return [state for run in self._runs for state in run.states()]


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return path.name, 0, 0
    return path.name, stat.st_size, stat.st_mtime_ns
