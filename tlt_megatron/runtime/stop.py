"""Ends a run early: a signal requests a stop, or this rank fails.

SIGTERM, SIGUSR1 and SIGINT are blocked in all threads and one thread takes them, so a rank inside a
collective receives them too. That thread never waits for the store, so a second Ctrl-C acts at
once. Ranks inform each other through events.py: a signal to one node stops all nodes, and a failed
rank ends all ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time

from tlt_megatron.runtime.environment_variables import program_name
from tlt_megatron.runtime.events import Event, EventKind, EventLog
from tlt_megatron.runtime.log import FILE_ONLY

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # USR1: Slurm's --signal
_LINGER_S = 2.0  # rank 0 hosts the store: the others need this time to read why it ends
_TELLING_S = 0.3  # for a second Ctrl-C, which a person waits for


class StopRequest:
    """Whether a stop of the run is requested.

    Ranks must agree on it before they act (collectives.agree_any).
    """

    def __init__(self, rank: int = 0, *, is_first_of_node: bool = True) -> None:
        self.is_requested = False
        self._rank = rank
        self._is_first_of_node = is_first_of_node
        self._is_training = self._has_ended = self._is_closed = False
        self._first: signal.Signals | None = None  # that this rank received
        self._events: EventLog | None = None
        self.has_lost_store = False
        self._ended_by: int | None = None  # the first rank that told why the run ends
        self._thread: threading.Thread | None = None

    @property
    def speaks(self) -> bool:
        """Return whether this rank writes to its console why the run ends: the first that told it.

        Where ranks cannot tell each other, the first rank of each node does, and rank 1 if rank 0
        is gone with its store.
        """
        if self._ended_by is not None:
            return self._ended_by == self._rank
        return self._is_first_of_node or (self.has_lost_store and self._rank == 1)

    def listen(self) -> None:
        """Take the signals from now on. Call it in the main thread before any other thread starts.

        Threads and child processes inherit the blocked signals. So a signal to the rank's process
        group does not end a child.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)
        self._thread.start()

    def share(self, events: EventLog) -> None:
        """Tell all ranks of requests and failures through `events`."""
        self._events = events

    def lose_store(self, error: RuntimeError) -> None:
        """Drop the store: it does not answer, so rank 0 is gone, and no rank can be told
        anything.
        """
        self._events, self.has_lost_store = None, True
        log.warning("the store of the run's events is gone: %s", error, extra=FILE_ONLY)

    def begin_training(self) -> None:
        """Record that there is state to save. Before this call, a signal ends the run at once."""
        self._is_training = True

    def hear(self, event: Event) -> None:
        """Take note of the first event of its kind."""
        if event.kind == EventKind.END:
            self._ended_by = event.rank
        elif not self.is_requested:
            log.warning("rank %d: %s, the run stops", event.rank, event.text, extra=FILE_ONLY)
            self.is_requested = True

    def end(self, code: int, line: str) -> bool:
        """Tell all ranks that this one ends with `code`, for the reason in `line`. They end within
        seconds.

        Returns whether to show the reason: this rank is the first to end, or it failed before ranks
        could tell each other. A rank shows it once, although a signal and a broken connection may
        end it at the same time.
        """
        is_again, self._has_ended = self._has_ended, True
        return self._tell(EventKind.END, line, code) and not is_again

    def close(self) -> None:
        """Stop listening; later signals have no effect."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None and thread.ident is not None:
            signal.pthread_kill(thread.ident, signal.SIGUSR1)  # wakes the listener
            thread.join()

    def _listen(self) -> None:
        while True:
            number = signal.Signals(signal.sigwait(SIGNALS))
            if self._is_closed:
                return
            if self._has_ended:
                continue  # torchrun sends SIGTERM when one rank has failed
            if self._first is None:
                self._first = number
                self.is_requested = self._is_training
                # The store may be slow, and a second Ctrl-C must not wait for it.
                tell = self._announce_stop if self._is_training else self._end_setup
                threading.Thread(target=tell, args=(number,), daemon=True).start()
            # torchrun passes a second Ctrl-C on as SIGTERM.
            elif self._first == signal.SIGINT and number != signal.SIGUSR1:
                self._end_at_once(128 + number)

    def _end_at_once(self, code: int) -> None:
        """End this process, and tell the others if the store answers in time.

        A rank that took both signals for one would report this rank as gone.
        """
        line = "second Ctrl-C: the run ends at once, nothing more is saved"
        is_first = [self._is_first_of_node]

        def tell() -> None:
            is_told = self._tell(EventKind.END, line, code)
            if not self.has_lost_store:  # rank 0 may have ended by now
                is_first.append(is_told)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        thread.join(_TELLING_S)
        end_process(code, line, is_shown=is_first[-1])

    def _announce_stop(self, number: signal.Signals) -> None:
        again = " (Ctrl-C again ends it at once)" if number == signal.SIGINT else ""
        is_first = self._tell(EventKind.STOP, number.name)
        log.warning(
            "%s: the run stops, and its state is saved first%s",
            *(number.name, again),
            extra={} if is_first else FILE_ONLY,
        )

    def _end_setup(self, number: signal.Signals) -> None:
        line = f"{number.name} during set-up: the run ends, there is nothing to save"
        if self.end(128 + number, line):
            _show(line)
        if self._events is not None and self._rank == 0:
            time.sleep(_LINGER_S)
        end_process(128 + number, line, is_shown=False)

    def _tell(self, kind: EventKind, text: str, code: int = 0) -> bool:
        """Write an event.

        Return whether this rank is the first to write one of this kind, so that it shows it.
        """
        if self._ended_by is not None or self._events is None:
            is_own_failure = self._ended_by is None and code == 1 and not self.has_lost_store
            return self.speaks or is_own_failure
        try:
            # torchrun sends SIGTERM when one rank has failed: that is not a request to stop.
            if kind == EventKind.STOP and EventKind.END in self._events.firsts():
                return False
            self._events.append(Event(kind=kind, rank=self._rank, code=code, text=text))
            return self._events.firsts()[kind].rank == self._rank
        except RuntimeError as error:  # all that a store raises
            self.lose_store(error)
            return self.speaks


def end_process(code: int, line: str, *, is_shown: bool) -> None:
    """End this process at once, whatever its main thread does.

    Children end when their pipes close or parents end.
    """
    log.warning("%s", line, extra=FILE_ONLY)
    if is_shown:
        _show(line)
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # a live display hides the cursor
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show(line: str) -> None:
    sys.stderr.write(f"{program_name()}: {line}\n")
    sys.stderr.flush()


def describe_failure(error: Exception, phase: str, rank: int) -> str:
    """Return one line: rank, host, phase, what happened.

    A long message is reduced to its first and last line.
    """
    message = str(error).replace("Traceback (most recent call last):", "")
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no message"]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return (
        f"rank {rank} on {socket.gethostname()} failed in {phase}: {type(error).__name__}: {text}"
    )
