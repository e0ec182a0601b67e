"""Logging of one rank: rank 0 writes to the console, every rank to a file. The launcher calls it
once.

The console handler reads sys.stderr at every line. So if a live display (progress.py) has replaced
sys.stderr, it prints the line above itself and stays intact.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TextIO

FILE_ONLY = {"is_file_only": True}  # log.error(..., extra=FILE_ONLY): not on any console
_OWN_PACKAGES = ("tlt_megatron", "launch", "__main__")


class _ConsoleHandler(logging.StreamHandler):
    """Writes to the current sys.stderr at the time of each line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


class _RankFileHandler(logging.FileHandler):
    """A separate type, so that a second configuration replaces only our own handlers."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once that the file cannot be written (a full disk, say).

        Python prints a traceback for each line.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            sys.stderr.write(f"{self.baseFilename}: cannot be written: {error}\n")


def configure_logging(rank: int, run_dir: Path | None) -> None:
    """Send the log of this rank to the console and, with `run_dir`, to
    <run_dir>/logs/node_0000/rank_00000.log.

    The file gets everything from INFO up. The console of rank 0 gets the same from our packages,
    and warnings from libraries. Other ranks show only warnings. Messages of Python's `warnings`
    module go only to the file.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _ConsoleHandler | _RankFileHandler):
            root.removeHandler(handler)
            handler.close()
    root.setLevel(logging.INFO)
    logging.captureWarnings(run_dir is not None)
    console = _ConsoleHandler()
    console.setLevel(logging.NOTSET if rank == 0 else logging.WARNING)
    console.addFilter(_is_for_console)
    console.setFormatter(_formatter(rank, "%H:%M:%S"))
    root.addHandler(console)
    if run_dir is not None:
        path = log_file(run_dir, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _RankFileHandler(path, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(_formatter(rank, "%Y-%m-%d %H:%M:%S"))
        root.addHandler(file)


def log_file(run_dir: Path, rank: int) -> Path:
    """Return the log of a rank of this node. Nodes have a folder each: thousands of ranks do not
    share one.
    """
    node = int(os.environ.get("GROUP_RANK", "0"))  # torchrun's name for the number of a node
    return run_dir / "logs" / f"node_{node:04d}" / f"rank_{rank:05d}.log"


def encodable(text: str) -> str:
    """Return a user's text for a store or file: halves of surrogate pairs become escapes."""
    return text.encode(errors="backslashreplace").decode()


def _is_for_console(record: logging.LogRecord) -> bool:
    if record.name == "py.warnings" or getattr(record, "is_file_only", False):
        return False
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in _OWN_PACKAGES


def _formatter(rank: int, date_format: str) -> logging.Formatter:
    return logging.Formatter(
        f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s", datefmt=date_format
    )
