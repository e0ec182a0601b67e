"""Processes of a reward pool: signals that reach them, and that none outlives its pool or its
trainer.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.reward_puppet import (
    CHILD,
    DAEMON,
    HANG,
    HANG_IN_C,
    PID,
    PUPPET,
    PoolMaker,
    prompt,
    score,
    wait_gone,
)

REPOSITORY = Path(__file__).parents[3]


def test_signals_to_stop_do_not_end_workers(make_pool: PoolMaker) -> None:
    """Neither while they start nor later."""
    others, workers = psutil.Process().children(recursive=True), []
    pool = make_pool(on_error="raise", num_workers=2)
    while len(workers) < 4:  # two with their keepers
        family = psutil.Process().children(recursive=True)
        workers = [child for child in family if child not in others]
    for _ in range(2):
        for worker in workers:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                worker.send_signal(number)
        pids = {worker.pid for worker in workers}
        assert {int(pid) for pid in score(pool, *[PID] * 50)} <= pids


def test_programs_of_a_reward_function_hear_the_signals_that_the_trainer_blocks(
    make_pool: PoolMaker,
) -> None:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        pool = make_pool(on_error="raise")
        start = "child = subprocess.Popen(['sleep', '1000'])"
        deed = start + "; child.send_signal({:d}); reward = child.wait()"
        found = score(pool, *[deed.format(number) for number in numbers])
        assert found == [-number for number in numbers]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("last", [None, HANG, HANG_IN_C])
def test_close_leaves_no_process(make_pool: PoolMaker, tmp_path: Path, last: str | None) -> None:
    pool = make_pool(num_workers=2)
    pool.wait_ready()
    pids = {int(pid) for pid in score(pool, *[PID] * 20, CHILD, DAEMON)}
    if last:
        for mark in (tmp_path / "a", tmp_path / "b"):
            pool.submit(mark, prompt(), f"open({str(mark)!r}, 'w').close()\n{last}")
            while not mark.exists():
                time.sleep(0.01)
    pool.close()
    pool.close()
    for pid in pids:
        wait_gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("later", prompt(), "reward = 1")
    with pytest.raises(RuntimeError, match="closed"):
        pool.collect()


@pytest.mark.parametrize("last", ["reward = 1", HANG, HANG_IN_C])
def test_workers_and_their_programs_end_with_a_trainer_that_is_killed(
    tmp_path: Path, last: str
) -> None:
    (tmp_path / "puppet.py").write_text(PUPPET)
    program = (
        "import time\n"
        "from tlt_megatron.rewards.workers import RewardPool\n"
        "from tlt_megatron.types import Prompt\n"
        "pool = RewardPool('puppet.py:act', num_workers=1, timeout_s=120, on_error='zero')\n"
        "row = Prompt(prompt_id='p', draw_index=0, token_ids=(1,))\n"
        f"for response in {(PID, CHILD, DAEMON)}:\n"
        "    pool.submit(response, row, response)\n"
        "rewards = pool.collect()\n"
        f"pool.submit('last', row, {last!r})\n"
        "print(*(int(outcome.score) for outcome in rewards.values()), flush=True)\n"
        "time.sleep(1000)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{program}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 3
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    for pid in pids:
        wait_gone(pid)
