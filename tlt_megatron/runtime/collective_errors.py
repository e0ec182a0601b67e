"""What torch says when a collective fails, in words: which call of ours, after how long. Used by heartbeat.py."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch.distributed as dist

_PACKAGE = Path(__file__).resolve().parents[1]
_RUNTIME = Path(__file__).resolve().parent
# As gloo (pair.cc, unbound_buffer.cc) and NCCL (ProcessGroupNCCL.cpp) put it; both raise plain RuntimeErrors too.
_COLLECTIVE = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer|Timed out waiting")
_STORE_ERRORS = (dist.DistNetworkError, dist.DistStoreError)
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)


def is_collective_error(error: RuntimeError) -> bool:
    """Whether it comes from communication among ranks."""
    if isinstance(error, dist.DistError) or isinstance(error.__cause__, dist.DistError):
        return True
    return bool(_COLLECTIVE.search(str(error)))


def describe_collective_error(error: RuntimeError, group_timeout_s: float) -> tuple[str, bool]:
    """A sentence that names the call, and whether it waited in vain for `group_timeout_s`.

    Example: ("gather_objects (trainer/rollout_worker.py, line 123): no answer within run.group_timeout_s=1800 s", True).
    """
    where = _call_site(error)
    first = str(error).partition("\n")[0]
    if any(isinstance(e, _STORE_ERRORS) for e in (error, error.__cause__)):
        return f"{where}: the job's store does not answer", False
    if _TIMEOUT.search(first):
        return f"{where}: no answer within run.group_timeout_s={group_timeout_s:g} s", True
    if "Connection" in first:
        return f"{where}: another rank closed its connection", False
    return f"{where}: {first}", False


def _call_site(error: BaseException) -> str:
    """The innermost function of ours, and who called it where that is one of runtime/."""
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
