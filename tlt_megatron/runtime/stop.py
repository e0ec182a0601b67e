"""Ends a run early: a signal requests a stop, or a rank fails. One thread of each rank listens for both.

The launcher creates it before torch is imported; the trainer reads `is_requested`. SIGTERM, SIGUSR1 and SIGINT are blocked in
all threads and the listener takes them, so a rank inside a collective receives them too. Ranks inform each other through a
store, which each rank reads twice per second. So a signal to one node stops all nodes, and a failed rank ends all ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from tlt_megatron.runtime.log import FILE_ONLY

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # USR1: Slurm's --signal
_POLL_S = 0.5  # seconds between two reads of the store
_OWN_END_S = 1.0  # for a rank that fails too: time to write its own traceback
_KEY = "events"
_STOP, _END = "stop", "end"


class StopRequest:
    """Whether a stop of the run is requested. Ranks must agree on it before they act (collectives.agree_any)."""

    def __init__(
        self, rank: int = 0, *, world_size: int = 1, is_first_of_node: bool = True
    ) -> None:
        self.is_requested = False
        self._is_training = self._has_ended = self._has_peer_ended = False
        self._first: signal.Signals | None = None  # that this rank received
        self._store: dist.Store | None = None
        self._has_lost_store = False
        self._rank = rank
        self._world_size = world_size
        self._is_first_of_node = is_first_of_node
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def listen(self) -> None:
        """Take the signals from now on. Call it in the main thread before any other thread starts.

        Threads and child processes inherit the blocked signals. So a signal to the rank's process group does not end a child.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)
        self._thread.start()

    def share(self, store: dist.Store) -> None:
        """Exchange requests and failures with all ranks through `store`, a connection used only here."""
        self._store = store

    def begin_training(self) -> None:
        """Record that there is state to save. Before this call, a signal ends the run at once."""
        self._is_training = True

    def end(self, code: int, line: str) -> bool:
        """End this rank with `code`, for the reason in `line`. All other ranks end within a second.

        Returns whether this rank is the first to end, so that its reason is the one to show.
        """
        self._has_ended = True
        return not self._has_peer_ended and self._tell(_END, code, line)

    def linger(self) -> None:
        """Wait before this rank exits after `end` if it hosts the store, so that the others can read it and end."""
        if self._store is not None and self._rank == 0 and self._world_size > 1:
            time.sleep(2 * _POLL_S + _OWN_END_S)

    def close(self) -> None:
        """Stop listening; later signals have no effect. Call it on every rank before rank 0, which hosts the store, ends."""
        self._is_closed = True
        if self._thread is not None:
            signal.pthread_kill(self._thread.ident, signal.SIGUSR1)  # wakes the listener
            self._thread.join()
            self._thread = None

    # ---- the listener

    def _listen(self) -> None:
        while not self._is_closed:
            taken = signal.sigtimedwait(SIGNALS, _POLL_S)
            if self._is_closed:
                return
            if self._has_ended:
                continue  # torchrun sends SIGTERM when one rank has failed
            self._read()
            # If SIGCONT ends the wait after its time, CPython returns an uninitialized record.
            if taken is not None and taken.si_signo in SIGNALS:
                self._take(signal.Signals(taken.si_signo))

    def _take(self, number: signal.Signals) -> None:
        """Act on a signal that this rank received."""
        name = number.name
        if not self._is_training:
            line = f"{name} during set-up: the run ends, there is nothing to save"
            is_shown = self.end(128 + number, line)
            self.linger()
            self._exit(128 + number, line, is_shown=is_shown)
        # torchrun passes a second Ctrl-C on as SIGTERM.
        if self._first == signal.SIGINT and number != signal.SIGUSR1:
            line = "second Ctrl-C: the run ends at once, nothing more is saved"
            self._exit(128 + number, line, is_shown=self._is_first_of_node)
        if self._first is None:
            self._first = number
            again = " (Ctrl-C again ends it at once)" if number == signal.SIGINT else ""
            is_first = self._tell(_STOP, 0, name)
            log.warning(
                "%s: the run stops, and its state is saved first%s",
                *(name, again),
                extra={} if is_first else FILE_ONLY,
            )
        self.is_requested = True

    def _read(self) -> None:
        """Read and act on the events of other ranks."""
        for kind, rank, code, line in self._events():
            if rank == self._rank:
                continue
            if kind == _END:
                self._has_peer_ended = True
                time.sleep(_OWN_END_S)
                if not self._has_ended:
                    self._exit(code, f"rank {rank} has ended the run: {line}", is_shown=False)
                return
            if not self.is_requested:
                log.warning("rank %d: %s, the run stops", rank, line, extra=FILE_ONLY)
                self.is_requested = True

    # ---- the store: lines in one order for all ranks

    def _tell(self, kind: str, code: int, line: str) -> bool:
        """Write an event. Return whether this rank is the first to write one of this kind.

        Without a store, return whether it is the first of its node. If the store is lost, so is rank 0, and rank 1 also returns
        True.
        """
        if self._store is None:
            return self._is_first_of_node or (self._has_lost_store and self._rank == 1)
        try:
            text = " ".join(line.splitlines())
            self._store.append(_KEY, f"{kind}\t{self._rank}\t{code}\t{text}\n")
        except RuntimeError as error:  # all that a store raises
            self._lose_store(error)
            return self._is_first_of_node or self._rank == 1
        firsts = [rank for told, rank, _, _ in self._events() if told == kind]
        return not firsts or firsts[0] == self._rank

    def _events(self) -> list[tuple[str, int, int, str]]:
        if self._store is None:
            return []
        try:
            if not self._store.check([_KEY]):
                return []
            text = self._store.get(_KEY).decode()
        except RuntimeError as error:
            self._lose_store(error)
            return []
        rows = (line.split("\t", 3) for line in text.splitlines())
        return [(kind, int(rank), int(code), line) for kind, rank, code, line in rows]

    def _lose_store(self, error: RuntimeError) -> None:
        """Drop the store. Rank 0, which hosts it, is gone, and the next collective will report that."""
        self._store, self._has_lost_store = None, True
        log.warning("the store of stop requests is gone: %s", error, extra=FILE_ONLY)

    def _exit(self, code: int, line: str, *, is_shown: bool) -> None:
        """End this process from the listener, whatever its main thread does. Children end when their pipes close or parents
        end.
        """
        log.warning("%s", line, extra=FILE_ONLY)
        if is_shown:
            sys.stderr.write(f"pretrain_rl: {line}\n")
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a live display hides the cursor
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def describe_failure(error: Exception, phase: str, rank: int) -> str:
    """Return one line: rank, host, phase, what happened. A long message is reduced to its first and last line."""
    message = str(error).replace("Traceback (most recent call last):", "")
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no message"]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return (
        f"rank {rank} on {socket.gethostname()} failed in {phase}: {type(error).__name__}: {text}"
    )
