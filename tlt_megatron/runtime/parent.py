"""A rank ends with the torchrun that started it: a rank that nobody supervises would hold GPUs and write checkpoints."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

AGENT_PID = "TLT_AGENT_PID"  # set by launch/torchrun.py: the process that starts the ranks
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Linux under torchrun only; elsewhere it does nothing.

    A shell may end before a rank that it started without torchrun.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = int(os.environ.get(AGENT_PID, os.getppid()))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)
