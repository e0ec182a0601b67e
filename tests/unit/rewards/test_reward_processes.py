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

from tests.reward_puppet import EXPECTED, PUPPET, PoolMaker, prompt, score, wait_gone

REPOSITORY = Path(__file__).parents[3]


def test_signals_to_stop_do_not_end_workers(make_pool: PoolMaker) -> None:
    """Neither while they start nor later."""
    others, workers = psutil.Process().children(), []
    pool = make_pool(on_error="raise", num_workers=2)
    while len(workers) < 2:
        workers = [child for child in psutil.Process().children() if child not in others]
    for _ in range(2):
        for worker in workers:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                worker.send_signal(number)
        pids = {worker.pid for worker in workers}
        assert {int(pid) for pid in score(pool, *["pid"] * 50)} <= pids


def test_programs_of_a_reward_function_hear_the_signals_that_the_trainer_blocks(
    make_pool: PoolMaker,
) -> None:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        pool = make_pool(on_error="raise")
        assert score(pool, *[f"signal_child {number:d}" for number in numbers]) == [
            -number for number in numbers
        ]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("last", [None, "hang", "hang_in_c"])
def test_close_leaves_no_process(make_pool: PoolMaker, tmp_path: Path, last: str | None) -> None:
    pool = make_pool(num_workers=2)
    pool.wait_ready()
    pids = {int(pid) for pid in score(pool, *["pid"] * 20, "child")}
    if last:
        for mark in (tmp_path / "a", tmp_path / "b"):
            pool.submit(mark, prompt(), f"{last} {mark}")
            while not mark.exists():
                time.sleep(0.01)
    pool.close()
    pool.close()
    for pid in pids:
        wait_gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("later", prompt(), "score 1")
    with pytest.raises(RuntimeError, match="closed"):
        pool.collect()


@pytest.mark.parametrize("verb", ["score 1", "hang", "hang_in_c"])
def test_workers_and_their_programs_end_with_a_trainer_that_is_killed(
    tmp_path: Path, verb: str
) -> None:
    (tmp_path / "puppet.py").write_text(PUPPET + EXPECTED)
    program = (
        "import time\n"
        "from tlt_megatron.rewards.workers import RewardPool\n"
        "from tlt_megatron.types import Prompt\n"
        "pool = RewardPool('puppet.py:act', num_workers=1, timeout_s=2, on_error='zero')\n"
        "row = Prompt(prompt_id='p', draw_index=0, token_ids=(1,))\n"
        "for response in ('pid', 'child'):\n"
        "    pool.submit(response, row, response)\n"
        "rewards = pool.collect()\n"
        f"pool.submit('last', row, {verb!r})\n"
        "print(int(rewards['pid'].score), int(rewards['child'].score), flush=True)\n"
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
    assert len(pids) == 2
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    # A function that holds the interpreter's lock lets nothing end its programs
    # (docs/reliability.md).
    for pid in pids if verb != "hang_in_c" else pids[:1]:
        wait_gone(pid)
