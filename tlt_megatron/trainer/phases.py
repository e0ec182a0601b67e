"""One call for each phase of a step: a span in the trace, seconds in the metrics, a word on the display."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tlt_megatron.runtime.progress import Progress
from tlt_megatron.runtime.timeline import Timeline


class Phases:
    """`with phases("ROLLOUT", "gen", batch=64): ...` adds to timing_s/gen and to this rank's lane of the trace."""

    def __init__(self, timeline: Timeline, progress: Progress) -> None:
        self.timeline = timeline
        self.progress = progress
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, timing: str, **args: object) -> Iterator[None]:
        """Run the body as phase `name`, timed under timing_s/<timing>."""
        self.progress.phase(name)
        start = time.perf_counter()
        with self.timeline.span(name, **args):
            yield
        self._seconds[timing] = self._seconds.get(timing, 0.0) + time.perf_counter() - start

    def take_timings(self) -> dict[str, float]:
        """timing_s/* since the last call, of this rank."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{name}": value for name, value in seconds.items()}
