"""Describes why a collective failed: which call of ours, and after how long.

Used by heartbeat.py.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch.distributed as dist

_PACKAGE = Path(__file__).resolve().parents[1]
_RUNTIME = Path(__file__).resolve().parent
# Messages of gloo (pair.cc, unbound_buffer.cc) and NCCL (ProcessGroupNCCL.cpp). Both also raise
# plain RuntimeErrors.
_COLLECTIVE = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer|Timed out waiting")
_STORE_ERRORS = (dist.DistNetworkError, dist.DistStoreError)
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)


def is_collective_error(error: RuntimeError) -> bool:
    """Return whether the error comes from communication among ranks."""
    if isinstance(error, dist.DistError) or isinstance(error.__cause__, dist.DistError):
        return True
    # The first line alone: the traceback of a user's reward function may hold "Connection reset by
    # peer" too.
    return bool(_COLLECTIVE.search(first_line(error)))


def describe_collective_error(error: RuntimeError, group_timeout_s: float) -> tuple[str, bool]:
    """Return a sentence that names the call, and whether the call timed out after
    `group_timeout_s`.

    Example: ("gather_objects (rollout/rollout_worker.py, line 123): no answer within
    run.group_timeout_s=1800 s", True).
    """
    where = _call_site(error)
    first = first_line(error)
    if any(isinstance(e, _STORE_ERRORS) for e in (error, error.__cause__)):
        return f"{where}: the job's store does not answer", False
    if _TIMEOUT.search(first):
        return f"{where}: no answer within run.group_timeout_s={group_timeout_s:g} s", True
    if "Connection" in first:
        return f"{where}: another rank closed its connection", False
    return f"{where}: {first}", False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type where there is no text."""
    return str(error).partition("\n")[0] or repr(error)


def _call_site(error: BaseException) -> str:
    """Return our innermost function, and its caller outside of runtime/ with file and line."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _PACKAGE in Path(frame.filename).parents
    ]
    if not frames:
        return "a collective"
    called = frames[-1].name
    outer = [f for f in frames if _RUNTIME not in Path(f.filename).parents] or frames
    place = Path(outer[-1].filename).relative_to(_PACKAGE)
    return f"{called} ({place}, line {outer[-1].lineno})"
