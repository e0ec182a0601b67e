"""A rank ends when its launcher has ended. A script between the two does not count as an end."""

from __future__ import annotations

import os
import subprocess
import sys

RANK = "from tlt_megatron.runtime.parent import end_with_parent; end_with_parent(); print('trains')"


def said_by_rank(agent_pid: int, *wrapper: str) -> str:
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", RANK],
        env=os.environ | {"TORCHELASTIC_RUN_ID": "1", "TLT_AGENT_PID": str(agent_pid)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout


def test_a_rank_behind_a_script_or_a_profiler_trains() -> None:
    assert said_by_rank(os.getpid(), "sh", "-c", '"$0" "$@"; true') == "trains\n"


def test_a_rank_whose_launcher_has_ended_does_not() -> None:
    launcher = subprocess.Popen(["true"])
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    assert said_by_rank(launcher.pid) == "", "of a launcher that is a zombie"
    launcher.wait()
    assert said_by_rank(launcher.pid) == ""
