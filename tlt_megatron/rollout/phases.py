"""Records each phase of a step: a span, seconds and peak memory, its name on the display and in the
rank's status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.memory_claim import Phase
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.runtime.timeline import Timeline

# The phase of the memory ledger for each phase here. EVAL is not listed: it consists of other
# phases.
_LEDGER_PHASES = {
    "SETUP": Phase.START,
    "ROLLOUT": Phase.ROLLOUT,
    "WAIT": Phase.SPOT,
    "PUBLISH": Phase.SPOT,
    "PLAN": Phase.UPDATE,
    "VALUES": Phase.UPDATE,
    "LOGPROB": Phase.UPDATE,
    "CRITIC": Phase.UPDATE,
    "UPDATE": Phase.UPDATE,
    "SYNC": Phase.WEIGHT_SYNC,
    "CHECKPOINT": Phase.CHECKPOINT,
}


@dataclass
class Phases:
    """`with phases("ROLLOUT", "gen", batch=64): ...` adds to timing_s/gen and to the trace."""

    timeline: Timeline
    progress: Progress
    device: Device
    on_phase: Callable[[], None]  # called when a phase has begun
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _peak_bytes: dict[Phase, int] = field(default_factory=dict, init=False)

    @contextmanager
    def __call__(self, name: str, timing: str, **args: Any) -> Iterator[None]:
        """Run the body as phase `name`, timed under timing_s/<timing>."""
        status = self.timeline.status
        status.count_phase(name)
        outer = status.phases
        ledger_phase = _LEDGER_PHASES.get(name)
        if ledger_phase:
            self.device.reset_peak()
        start = time.perf_counter()
        try:
            with self.timeline.span(name, **args):
                self.on_phase()
                yield
        except GenerationStopped:  # not a failure of the phase
            status.leave(outer)
            raise
        finally:  # an interrupted phase also has a peak
            if ledger_phase:
                peak = max(self.device.peak_bytes(), self._peak_bytes.get(ledger_phase, 0))
                self._peak_bytes[ledger_phase] = peak
        self._seconds[timing] = self._seconds.get(timing, 0.0) + time.perf_counter() - start

    def take_timings(self) -> dict[str, float]:
        """Return this rank's timing_s/* since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{name}": value for name, value in seconds.items()}

    def take_peaks(self) -> dict[Phase, int]:
        """Return peak bytes by phase since the last call: resident on a CPU, reserved on a GPU."""
        peaks, self._peak_bytes = self._peak_bytes, {}
        return peaks
