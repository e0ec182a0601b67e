"""A rank that freezes in a run under torchrun: the other ends within the bound and says in one line who, where and when."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tiny_task import REPO, torchrun

pytestmark = pytest.mark.e2e

LIMIT_S = 300.0  # of each wait; a healthy machine needs seconds


def await_(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)


def has_ended(process: psutil.Process) -> bool:
    """A zombie has."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ranks_of(agent: subprocess.Popen) -> dict[int, psutil.Process]:
    children = psutil.Process(agent.pid).children()
    return {int(c.environ()["RANK"]): c for c in children if "RANK" in c.environ()}


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_of_a_frozen_rank_end(victim: int, config: Path, tmp_path: Path) -> None:
    rollouts = ("rollout.num_prompts=8", "rollout.max_new_tokens=120", "run.num_steps=10000")
    spot = (
        "speculation.enabled=true",
        "speculation.strategies=['2_1_2']",
        "spot.enabled=true",
        "data.eval=",
    )
    agent = subprocess.Popen(
        torchrun(
            2,
            "--config",
            config,
            f"run.dir={tmp_path}",
            "run.heartbeat_timeout_s=5",
            *rollouts,
            *spot,
        ),
        cwd=REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    everyone: list[psutil.Process] = []
    try:
        await_(lambda: (tmp_path / "rollouts" / "step_0000001.jsonl").exists(), "a step")
        ranks = ranks_of(agent)
        everyone = [p for rank in ranks.values() for p in (rank, *rank.children(recursive=True))]
        ranks[victim].send_signal(signal.SIGSTOP)
        await_(lambda: has_ended(ranks[1 - victim]), "the end of the other rank")
        ranks[victim].kill()
        _, said = agent.communicate(timeout=LIMIT_S)
        assert agent.returncode == 1
        await_(lambda: all(map(has_ended, everyone)), "the end of all processes")
    finally:
        agent.kill()
        for process in everyone:
            if not has_ended(process):
                process.kill()
    pattern = rf"rank {victim} \(host \S+, pid {ranks[victim].pid}\) has been silent for run\.heartbeat_timeout_s=5 s in phase [A-Z -]+: its process is stopped"
    assert re.search(pattern, said), said
    log = (tmp_path / "logs" / f"rank_{1 - victim:05d}.log").read_text()
    assert len(re.findall(f"the run ends: {pattern}", log)) >= 1
