"""What a rank does now: one record, which the trace changes (timeline.py) and which the heartbeat,
the display and errors name.

A copy is in <run dir>/status/rank_*.json: `tlt watch` shows the step that is under way from these
files.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0  # between two writes of a rank
_WRITES_PER_S = 200  # all ranks together: they share a file system


@dataclass(slots=True, kw_only=True)
class RankStatus:
    """One rank now. Its main thread changes the record, any thread may read it.

    Times are seconds since the epoch.
    """

    rank: int
    num_ranks: int
    host: str = field(default_factory=socket.gethostname)
    device: str = ""  # "cpu", or the name of the GPU
    changed_s: float = field(default=0.0, compare=False)  # as the file tells it
    step: int = 0  # the RL step under way, or the last one
    step_began_s: float | None = None  # None between steps
    # the open phases, the innermost last; after an error, what failed
    phases: tuple[str, ...] = ("SETUP",)
    phase_began_s: float = field(default_factory=time.time)  # the innermost one
    num_phases: int = 0  # phases of the loop that began; a rank that is behind has fewer
    loop_phase: str = ""  # the newest one of them, as the display shows it: "EVAL ROLLOUT"
    loop_phase_began_s: float = 0.0
    num_responses: int = 0  # to generate in the rollout phase of the step
    num_done: int = 0
    num_tokens: int = 0  # in the responses that are done

    @property
    def phase(self) -> str:
        """Return the open phases as text."""
        return " ".join(self.phases) or "between phases"

    def count_phase(self, name: str) -> None:
        """Count a phase of the loop, before `enter`. The first one ends the set-up."""
        if not self.num_phases:
            self.phases = ()
        self.num_phases += 1
        self.loop_phase, self.loop_phase_began_s = " ".join((*self.phases, name)), time.time()

    def enter(self, name: str) -> tuple[str, ...]:
        """Begin a phase or a part of one.

        Return what to give to `leave` at its end, unless that is an exception.
        """
        outer = self.phases
        self.leave((*outer, name))
        return outer

    def leave(self, outer: tuple[str, ...]) -> None:
        """Go back to the phases that `enter` returned.

        Calls from other threads than the main one have no effect.
        """
        if threading.current_thread() is threading.main_thread():
            self.phases, self.phase_began_s = outer, time.time()

    def begin_step(self, step: int) -> None:
        self.step, self.step_began_s = step, time.time()
        self.expect_responses(0)

    def end_step(self) -> None:
        self.step_began_s = None

    def expect_responses(self, count: int) -> None:
        self.num_responses, self.num_done, self.num_tokens = count, 0, 0

    def add_response(self, num_tokens: int) -> None:
        self.num_done += 1
        self.num_tokens += num_tokens


class StatusWriter:
    """Writes a rank's status to its file whenever it has changed.

    A thread writes, so the main thread makes no system call, and a burst of changes is one write.
    """

    def __init__(self, run_dir: Path, status: RankStatus) -> None:
        self._path = run_dir / "status" / f"rank_{status.rank:05d}.json"
        self._status = status
        self._written: RankStatus | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last status."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        """Write until `close`.

        While the file system refuses, the run goes on with an old status.
        """
        interval_s = max(_INTERVAL_S, self._status.num_ranks / _WRITES_PER_S)
        is_last = is_warned = False
        while not is_last:
            is_last = self._is_closed.wait(interval_s)
            try:
                self._write()
            except OSError as error:
                if not is_warned:
                    log.warning("%s: cannot write the status of this rank: %s", self._path, error)
                is_warned = True

    def _write(self) -> None:
        now = dataclasses.replace(self._status, changed_s=time.time())
        if now != self._written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(dataclasses.asdict(now)), encoding="utf-8")
            temporary.replace(self._path)
            self._written = now
