"""A polite stop: SIGTERM and SIGUSR1 (Slurm's --signal) ask the run to save and end at the next step boundary."""

from __future__ import annotations

import logging
import signal
from types import FrameType

log = logging.getLogger(__name__)


class StopRequest:
    """Whether this rank has been asked to stop. Ranks must agree on it before they act (collectives.agree_any)."""

    def __init__(self) -> None:
        self.is_requested = False

    def install(self) -> None:
        """Take over SIGTERM and SIGUSR1. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        log.warning("%s: saving and stopping after this step", signal.Signals(number).name)
