"""Ends a rank when the torchrun that started it ends.

Otherwise an unsupervised rank would hold GPUs and write checkpoints.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from tlt_megatron.runtime.rank_process import find_process, state_of

AGENT_PID = "TLT_AGENT_PID"  # set by launch/torchrun.py: the process that starts the ranks
# the process of a `Trainer`: launch/torchrun.py saves and stops the run when that ends
TRAINER_PID = "TLT_TRAINER_PID"
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def run_environment() -> dict[str, str]:
    """Return the environment of a run that this script or notebook starts, and that is stopped when
    it ends.

    The run can import what the script can, such as a module beside it that a reward uses.
    """
    path = os.pathsep.join(str(entry) or os.getcwd() for entry in sys.path)
    own = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, TRAINER_PID: str(os.getpid())}
    return os.environ | own


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Only on Linux under torchrun;
    elsewhere it does nothing.

    Without torchrun the parent is a shell, which may end before the rank does.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = int(os.environ.get(AGENT_PID, os.getppid()))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    # A profiler or a shell script may stand between the two.
    if os.getppid() != parent and state_of(find_process(parent)).is_gone:  # before the kernel knew
        os._exit(1)
