"""Times the passes of a decode loop on a device that works behind the host's back.

Used by the embedded engine, whose selectors compare what passes cost. What to know: on a GPU a plain pass is only started by
the call that runs it, and is waited for by the draw of the tokens that it brings; so both together are the pass, and what the
host does between them (prefilling newcomers) must neither count nor hide the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tlt_megatron.speculation.strategy import SpeculationStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A pass, or the passes of one draft and verification."""

    strategy: SpeculationStrategy
    batch_size: int
    accepted: Sequence[int]  # drafted tokens of each row; empty for a plain pass


class PassClock:
    """Seconds of one pass at a time.

    Example: `clock.start()`; `with clock.running(): forward()`; `with clock.interrupted(): prefill()`;
    `with clock.running(): draw()`; then `clock.seconds`.
    """

    def __init__(
        self, wait: Callable[[], None], now: Callable[[], float] = time.perf_counter
    ) -> None:
        """`wait` is `Device.synchronize`; it is called for interruptions alone."""
        self._wait = wait
        self._now = now
        self.start_s = 0.0  # on the clock of time.perf_counter
        self.seconds = 0.0

    def start(self) -> None:
        """A pass begins."""
        self.start_s = self._now()
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is done in this block belongs to the pass."""
        started = self._now()
        yield
        self.seconds += self._now() - started

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """What is done in this block does not, on the device either."""
        with self.running():
            self._wait()
        yield
        self._wait()
