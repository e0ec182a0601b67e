"""Times the passes of a decode loop on a device that runs asynchronously to the host.

On a GPU the call of a plain pass only launches it; the sampling of its tokens waits for it. So a pass is both blocks together.
Work between them, such as prefilling new requests, must not count and must not hide the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PassClock:
    """Measures one pass at a time, in seconds.

    Example: `clock.start()`; `with clock.running(): forward()`; `with clock.interrupted(): prefill()`;
    `with clock.running(): draw()`; then `clock.seconds`.
    """

    def __init__(
        self, wait: Callable[[], None], now: Callable[[], float] = time.perf_counter
    ) -> None:
        """`wait` is `Device.synchronize`. Only `interrupted` calls it."""
        self._wait = wait
        self._now = now
        self.start_s = 0.0  # on the clock of time.perf_counter
        self.seconds = 0.0

    def start(self) -> None:
        self.start_s = self._now()
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of this block as part of the pass."""
        started = self._now()
        yield
        self.seconds += self._now() - started

    def exclude(self, seconds: float) -> None:
        self.seconds -= seconds

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Exclude the time of this block, on the host and on the device."""
        with self.running():
            self._wait()
        yield
        self._wait()
