"""What a rank does now, in <run dir>/status/rank_*.json: `tlt watch` shows the step that is under
way from these files.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tlt_megatron.runtime.step_phase import StepPhase

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0  # between two writes of a rank
_WRITES_PER_S = 200  # of all ranks together, for the file system that they share


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank at one moment. Times are seconds since the epoch."""

    rank: int
    num_ranks: int
    host: str
    changed_s: float
    step: int = 0  # the RL step under way, or the last one
    step_began_s: float | None = None  # None between steps
    phases: tuple[str, ...] = ()  # the open ones, the innermost last
    phase_began_s: float = 0.0  # the innermost one
    num_phases: int = 0  # begun; a rank that is behind has fewer than the others
    num_responses: int = 0  # to generate in the rollout phase of the step
    num_done: int = 0
    num_tokens: int = 0  # of the responses that are done


class StatusWriter:
    """Writes the status of this rank. Without a run folder it does nothing.

    A thread writes if the status has changed. So the main thread makes no system call, and a burst
    of changes is one write.
    """

    def __init__(
        self,
        run_dir: Path | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        phase: StepPhase | None = None,
    ) -> None:
        self.phase = phase or StepPhase()
        self.status = RankStatus(
            rank=rank,
            num_ranks=num_ranks,
            host=socket.gethostname(),
            changed_s=time.time(),
        )
        self._written: RankStatus | None = None
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if run_dir is not None:
            path = run_dir / "status" / f"rank_{rank:05d}.json"
            self._thread = threading.Thread(
                target=self._run, args=(path,), name="status", daemon=True
            )
            self._thread.start()

    def begin_step(self, step: int) -> None:
        self._change(step=step, step_began_s=time.time(), num_responses=0, num_done=0, num_tokens=0)

    def end_step(self) -> None:
        self._change(step_began_s=None)

    def expect_responses(self, count: int) -> None:
        self._change(num_responses=count, num_done=0, num_tokens=0)

    def add_response(self, num_tokens: int) -> None:
        now = self.status
        self._change(num_done=now.num_done + 1, num_tokens=now.num_tokens + num_tokens)

    def close(self) -> None:
        """Write the last status."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _change(self, **changes: object) -> None:
        self.status = dataclasses.replace(self.status, changed_s=time.time(), **changes)

    def _run(self, path: Path) -> None:
        """Write until `close`.

        While the file system refuses, the run goes on with an old status.
        """
        interval_s = max(_INTERVAL_S, self.status.num_ranks / _WRITES_PER_S)
        is_last = is_warned = False
        while not is_last:
            is_last = self._is_closed.is_set()
            try:
                self._write(path)
            except OSError as error:
                if not is_warned:
                    log.warning("%s: cannot write the status of this rank: %s", path, error)
                is_warned = True
            if not is_last:
                self._is_closed.wait(interval_s)

    def _write(self, path: Path) -> None:
        phase = self.phase
        status = dataclasses.replace(
            self.status,
            changed_s=max(self.status.changed_s, phase.began_s),
            phases=phase.names,
            phase_began_s=phase.began_s,
            num_phases=phase.num_begun,
        )
        if status != self._written:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(dataclasses.asdict(status)), encoding="utf-8")
            temporary.replace(path)
            self._written = status
