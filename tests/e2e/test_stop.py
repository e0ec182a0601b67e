"""How a run ends before its time, through torchrun on two ranks: Ctrl-C, a rank that fails, input
that one rank refuses.

The reward function does not return while a file `hold` exists. tests/faults stops runs at any point
and resumes them.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.ranks import LIMIT_S
from tests.tiny_task import REPO, REWARD, make_tiny_task, python
from tests.torchrun_job import HOLDING, Job, saved_step
from tests.unit.mcore.test_checkpoint_reader import Call

pytestmark = pytest.mark.e2e

HELD = f'''{REWARD}
{HOLDING}

def held_score(data_source, solution_str, ground_truth, extra_info=None):
    """It fails once where `fail` exists."""
    hold()
    if (FOLDER / "fail").exists():
        (FOLDER / "fail").unlink()
        raise ZeroDivisionError("this response divides by zero")
    return compute_score(data_source, solution_str, ground_truth)
'''


@pytest.fixture
def task(tmp_path: Path) -> Path:
    config = make_tiny_task(tmp_path)
    (tmp_path / "reward.py").write_text(HELD)
    return config


@pytest.fixture
def start(task: Path, start_job: Callable[..., Job]) -> Callable[..., Job]:
    def start(name: str, *arguments: str, **door: bool) -> Job:
        held = (f"reward.function={task.parent}/reward.py:held_score", "data.eval=")
        return start_job(task, task.parent / name, *held, *arguments, **door)

    return start


def test_ctrl_c_under_plain_torchrun_saves_although_it_fails(start: Callable[..., Job]) -> None:
    job = start("plain, it's", is_plain=True)
    job.wait_until_held()
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.process.wait(timeout=LIMIT_S) == 1
    job.line("SIGINT: the run stops")
    assert saved_step(job.run_dir) == 0
    job.go_on("saved step 0 of 3; resume with:")
    assert saved_step(job.run_dir) == 3


def check_loopback(job: Job) -> None:
    ports = job.open_ports()
    assert ports
    assert {address.removeprefix("::ffff:") for address, _ in ports} <= {"127.0.0.1", "::1"}, ports


def test_second_ctrl_c_ends_at_once_although_a_rank_is_frozen(start: Callable[..., Job]) -> None:
    """And until then nothing listens beyond the loopback, and nobody loads a pickle from a
    store.
    """
    job = start("frozen")
    job.wait_until_held()
    family = job.family()
    ranks = [p for p in family if os.getpgid(p.pid) == p.pid and p.ppid() == job.process.pid]
    check_loopback(job)
    state = base64.b64encode(pickle.dumps(Call(open, str(job.folder / "loaded"), "w")))
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


def test_ctrl_c_twice_to_one_rank_is_no_rank_that_is_gone(start: Callable[..., Job]) -> None:
    job = start("one rank")
    job.wait_until_held()
    ranks = psutil.Process(job.process.pid).children()
    rank = next(p for p in ranks if p.environ().get("RANK") == "1")
    rank.send_signal(signal.SIGINT)
    job.wait_until(lambda: job.lines("Ctrl-C again ends it at once"), "the first is heard")
    rank.send_signal(signal.SIGINT)
    job.end(128 + signal.SIGINT)
    assert job.line("pretrain_rl:").endswith(
        "second Ctrl-C: the run ends at once, nothing more is saved"
    )
    assert not job.lines("is gone")


def test_an_error_of_a_rank_is_one_line_and_ends_all(start: Callable[..., Job]) -> None:
    job = start("failed", is_tlt=True)
    job.wait_until_held()
    check_loopback(job)
    (job.folder / "fail").touch()
    (job.folder / "hold").unlink()
    job.end(1)
    line = job.line("failed in ")
    assert line.startswith("tlt train: rank ")
    assert f" on {os.uname().nodename} failed in REWARD after step 0: RuntimeError: " in line
    assert "ZeroDivisionError: this response divides by zero" in line
    job.line("RuntimeError")
    logs = [path.read_text() for path in sorted((job.run_dir / "logs").glob("node_*/*"))]
    assert sum("Traceback" in text for text in logs) >= 1
    assert sum("the run ends: " in text or "Traceback" in text for text in logs) == 2
    job.go_on("nothing is saved yet; start again with:")
    assert saved_step(job.run_dir) == 3


def test_a_run_of_one_rank_that_is_killed_says_how_to_start_again(task: Path) -> None:
    (task.parent / "kill").touch()
    (task.parent / "reward.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if Path(__file__).with_name('kill').exists():\n"
        "        Path(__file__).with_name('kill').unlink()\n"
        "        keeper = Path(f'/proc/{os.getppid()}/stat').read_text()\n"
        "        trainer = int(keeper.rpartition(')')[2].split()[1])\n"
        "        os.kill(trainer, signal.SIGKILL)\n"
        "    return float(len(solution_str) % 2)\n"
    )
    run_dir = task.parent / "killed"
    words = ("--config", task, f"run.dir={run_dir}", "data.eval=", "reward.num_workers=1")
    ended = python("launch/torchrun.py", "--standalone", "launch/pretrain_rl.py", *words)
    assert ended.returncode == 128 + signal.SIGKILL
    *_, killed, way, command = ended.stderr.splitlines()
    assert "was ended by SIGKILL" in killed
    assert way == "nothing is saved yet; start again with:"
    again = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert saved_step(run_dir) == 3


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
        "    raise ValueError('no judge on this host')\n" + HELD
    )
    job = start("refused", "reward.num_workers=2")
    job.end(2)
    line = job.line("pretrain_rl:")
    assert "fails to load: ValueError('no judge on this host')" in line
    log = (job.run_dir / "logs" / "node_0000" / "rank_00000.log").read_text()
    assert "the run ends: " in log
    assert "no judge on this host" in log
