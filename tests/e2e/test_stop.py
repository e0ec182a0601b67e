"""How a run ends before its time, through torchrun on two ranks: signals, a killed launcher, a rank
that fails.

Rollouts wait for what the test decides, never for a clock: the reward function does not return
while a file `hold` exists, and a pipe in place of a step's record of rollouts keeps rank 0 inside
that step.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.tiny_task import check_same_run, make_tiny_task, run
from tests.torchrun_job import HOLDING, LIMIT_S, Job, saved_step

pytestmark = pytest.mark.e2e

REWARD = f'''"""The tiny task's reward. It fails once where `fail` exists."""
{HOLDING}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    hold()
    if (FOLDER / "fail").exists():
        (FOLDER / "fail").unlink()
        raise ZeroDivisionError("this response divides by zero")
    digits = [c for c in solution_str if c.isdigit()]
    return round(4 * sum(c < ground_truth for c in digits) / max(1, len(digits))) / 4
'''
# Rank 0 has twice the work of rank 1, which trains the drafter meanwhile.
SETTINGS = (
    *("run.num_steps=3", "rollout.num_prompts=3", "rollout.num_samples=112"),
    *("rollout.max_new_tokens=48", "data.eval=", "logging.trackers=[]"),
)
SPOT = (
    *("speculation.enabled=true", "speculation.strategies=['3_1_3']"),
    *("spot.enabled=true", "drafter.batch_tokens=64"),
)
FAST, SLOW = "rollout.max_batch_size=64", "rollout.max_batch_size=1"  # the tokens are the same


@pytest.fixture
def task(tmp_path: Path) -> Path:
    config = make_tiny_task(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    return config


@pytest.fixture
def start(task: Path, start_job: Callable[..., Job]) -> Callable[..., Job]:
    def start(name: str, *arguments: str, **door: bool) -> Job:
        return start_job(task, task.parent / name, *SETTINGS, *arguments, **door)

    return start


def test_a_run_that_was_stopped_three_times_equals_the_straight_run(
    task: Path, start: Callable[..., Job]
) -> None:
    run_dir, resume = task.parent / "stopped", ("--resume", "auto")

    # SIGTERM in the first rollouts: the state of the beginning, although rewards are in flight and
    # rank 1 trains.
    job = start("stopped", SLOW, *SPOT)
    job.wait_until_held()
    job.process.terminate()
    job.end(0)
    assert saved_step(run_dir) == 0
    assert json.loads((run_dir / "summary.json").read_text())["num_steps"] == 0
    job.line("SIGTERM: the run stops")
    job.line("saved step 0 of 3; resume with: --resume auto run.dir=")

    # SIGUSR1 after the rollouts of a step: the save follows its update.
    job = start("stopped", FAST, *SPOT, *resume)
    job.wait_until_held()
    record = run_dir / "rollouts" / "step_0000001.rank_00000.jsonl"
    record.parent.mkdir(exist_ok=True)
    os.mkfifo(record)
    (job.folder / "hold").unlink()
    with open(os.open(record, os.O_RDONLY | os.O_NONBLOCK)) as pipe:
        # Rank 0 has come to write more than a pipe holds, and waits until it is read.
        job.wait_until(lambda: select.select([pipe], [], [], 0)[0], "the update is done")
        job.process.send_signal(signal.SIGUSR1)
        job.wait_until(lambda: job.lines("SIGUSR1: the run stops"), "the signal is heard")
        os.set_blocking(pipe.fileno(), True)
        text = pipe.read()
    assert len(text) > 1 << 16, "rank 0 did not wait"
    record.unlink()
    record.write_text(text)
    job.end(0)
    assert saved_step(run_dir) == 1
    folder = run_dir / "checkpoints" / "iter_0000001"
    written_ns = folder.stat().st_mtime_ns

    # Ctrl-C under plain torchrun, which fails even so; what is on the disk is not saved again.
    job = start("stopped", SLOW, *resume, is_plain=True)
    job.wait_until_held()
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.process.wait(timeout=LIMIT_S) == 1
    (task.parent / "hold").unlink()
    job.line("SIGINT: the run stops")
    job.line("saved step 1 of 3")
    assert folder.stat().st_mtime_ns == written_ns

    run(2, task, run_dir, *SETTINGS, FAST, *SPOT, *resume)
    run(2, task, task.parent / "straight", *SETTINGS, FAST)
    check_same_run(run_dir, task.parent / "straight")


def check_loopback(job: Job) -> None:
    ports = job.open_ports()
    assert ports
    assert {address.removeprefix("::ffff:") for address, _ in ports} <= {"127.0.0.1", "::1"}, ports


class _Planted:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


def test_second_ctrl_c_ends_at_once_although_a_rank_is_frozen(start: Callable[..., Job]) -> None:
    """And until then nothing listens beyond the loopback, and nobody loads a pickle from a store."""
    job = start("frozen", SLOW)
    job.wait_until_held()
    family = job.family()
    ranks = [p for p in family if os.getpgid(p.pid) == p.pid and p.ppid() == job.process.pid]
    check_loopback(job)
    state = base64.b64encode(pickle.dumps(_Planted(job.folder / "loaded")))
    launcher = psutil.Process(job.process.pid).net_connections("tcp")
    for port in {c.laddr.port for c in launcher if c.status == psutil.CONN_LISTEN}:
        store = dist.TCPStore("127.0.0.1", port)
        store.set(f"torch.rendezvous.{ranks[0].environ()['TORCHELASTIC_RUN_ID']}", state)
    ranks[1].suspend()
    os.killpg(job.process.pid, signal.SIGINT)
    job.wait_until(lambda: job.lines("Ctrl-C again ends it at once"), "the first is heard")
    os.killpg(job.process.pid, signal.SIGINT)
    job.end(128 + signal.SIGKILL)
    job.line("second Ctrl-C: nothing more is saved")
    assert not psutil.wait_procs(family, timeout=LIMIT_S)[1]
    assert not (job.folder / "loaded").exists()


def test_an_error_of_a_rank_is_one_line_and_ends_all(start: Callable[..., Job]) -> None:
    job = start("failed", SLOW, is_tlt=True)
    job.wait_until_held()
    check_loopback(job)
    (job.folder / "fail").touch()
    (job.folder / "hold").unlink()
    job.end(1)
    line = job.line("failed in ")
    assert line.startswith("pretrain_rl: rank ")
    assert f" on {os.uname().nodename} failed in REWARD after step 0: RuntimeError: " in line
    assert "ZeroDivisionError: this response divides by zero" in line
    job.line("rror")
    logs = [path.read_text() for path in sorted((job.run_dir / "logs").iterdir())]
    assert sum("Traceback" in text for text in logs) >= 1
    assert sum("the run ends: " in text or "Traceback" in text for text in logs) == 2


def test_bad_input_that_one_rank_finds_ends_all_before_it_has_closed(
    task: Path, start: Callable[..., Job]
) -> None:
    """Rank 0 learns the reason and the exit code while rank 1 still ends its reward workers."""
    (task.parent / "reward.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "first = Path(__file__).with_name('rank 1 loads')\n"
        "if os.environ['RANK'] == '1':\n"
        "    try:\n"
        "        first.touch(exist_ok=False)\n"
        "    except FileExistsError:\n"
        "        time.sleep(60)\n"
        "    raise ValueError('no judge on this host')\n" + REWARD
    )
    job = start("refused", FAST, "reward.num_workers=2")
    job.end(2)
    line = job.line("pretrain_rl:")
    assert "fails to load: ValueError('no judge on this host')" in line
    log = (job.run_dir / "logs" / "rank_00000.log").read_text()
    assert "the run ends: " in log
    assert "no judge on this host" in log
