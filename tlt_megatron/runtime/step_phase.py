"""What a rank does now.

The trace tells it (timeline.py); the heartbeat, the rank's status, the display and errors name it.
"""

from __future__ import annotations

import threading
import time


class StepPhase:
    """The open phases of a step. The main thread changes them, any thread may read them."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ("SETUP",)  # the innermost last; after an error, what failed
        self.began_s = time.time()  # the innermost one, seconds since the epoch
        self.num_begun = 0  # phases of the loop; a rank that is behind has fewer than the others
        self.of_loop = ""  # the newest phase of the loop, as the display shows it: "EVAL ROLLOUT"
        self.of_loop_began_s = time.monotonic()

    def __str__(self) -> str:
        return " ".join(self.names) or "between phases"

    def begin(self, name: str) -> None:
        """Count a phase of the loop, before `enter`. The first one ends the set-up."""
        if not self.num_begun:
            self.names = ()
        self.num_begun += 1
        self.of_loop, self.of_loop_began_s = " ".join((*self.names, name)), time.monotonic()

    def enter(self, name: str) -> tuple[str, ...]:
        """Begin a phase or a part of one.

        Return what to give to `leave` at its end, unless that is an exception.
        """
        outer = self.names
        self.leave((*outer, name))
        return outer

    def leave(self, outer: tuple[str, ...]) -> None:
        """Go back to the phases that `enter` returned.

        Calls from other threads than the main one have no effect.
        """
        if threading.current_thread() is threading.main_thread():
            self.names, self.began_s = outer, time.time()
