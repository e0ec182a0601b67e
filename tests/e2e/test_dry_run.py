"""`--dry-run`: all nodes of a job are checked, and nothing is started or left.

Two launchers stand for two nodes, by launch/slurm/multi_node.sbatch and stand-ins for Slurm's
commands.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_requeue import Cluster
from tests.ranks import free_port
from tests.tiny_task import REPO, python
from tests.torchrun_job import Job
from tests.unit.test_doctor import install

pytestmark = pytest.mark.e2e

ROWS = (
    *("nodes", "settings, files", "ports", "model.path", "data.train", "reward.function"),
    *("layout", "memory", "checkpoints", "run.dir", "tlt_megatron"),
    *("Python", "torch", "megatron-core", "network", "clock"),
)


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_all_nodes_of_a_job_are_checked_and_nothing_is_started(
    tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    cluster = Cluster(tmp_path, start_job)
    before = files(tmp_path)
    job = cluster.start("--dry-run")
    job.end(0)
    starts = [line[:26].split("  ") for line in job.output.splitlines()]
    assert {words[0] for words in starts[:-1]} == {"ok"}, job.output
    rows = [line[6:26].strip() for line in job.output.splitlines()[:-1]]
    assert [row for row in rows if row in ROWS] == [*ROWS]
    job.line("nodes               2 x 1 ranks")
    job.line("layout              TP 1 x CP 1 x PP 1 x DP 2, EP 1")
    job.line("network             gloo connects all nodes")
    job.line(f"dry run: all {len(rows)} checks pass; nothing was started")
    assert files(tmp_path) - before == {tmp_path / "run.out"}


def test_a_node_that_differs_is_named_with_its_row_and_the_job_is_not_requeued(
    tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    """Each node has a disk of its own. Node 1 has other prompts, and another version of
    Megatron-core.
    """
    cluster = Cluster(tmp_path, start_job)
    (tmp_path / "packages").mkdir()
    install(tmp_path / "packages", "megatron-core", "0.19.2", "")
    prompts = (tmp_path / "train.jsonl").read_text()
    for node, content in enumerate((prompts, prompts + prompts)):
        disk = tmp_path / f"disk{node}"
        disk.mkdir()
        (disk / "launch").symlink_to(REPO / "launch")
        (disk / "mine.jsonl").write_text(content)
        (tmp_path / f"node{node}.sh").write_text(f"cd {disk}\n")
    with (tmp_path / "node1.sh").open("a") as file:
        file.write(f"export PYTHONPATH={tmp_path}/packages:$PYTHONPATH\n")
    job = cluster.start("data.train=mine.jsonl", "--dry-run")
    job.end(2)
    lines = job.output.splitlines()
    for row, on_node_0, on_node_1 in (
        ("data.train", r"1 file, \d+\.\d MB, \w{8}", r"1 file, \d+\.\d MB, \w{8}"),
        ("megatron-core", r"0\.\d+\.\d+", r"0\.19\.2"),
    ):
        where = next(i for i, line in enumerate(lines) if line.startswith(f"FAIL  {row} "))
        assert re.search(rf"node 0 \(\S+\): {on_node_0}$", lines[where])
        assert re.search(rf"^ +node 1 \(\S+\): {on_node_1}$", lines[where + 1])
    last = r"dry run: 2 of \d+ checks fail: data.train \(node 1 .*\); megatron-core \(node 1 .*\)"
    assert re.fullmatch(last, lines[-1]), job.output
    assert not cluster.run_dir.exists()
    assert not cluster.requeued.exists()


def test_a_dry_run_that_is_stopped_leaves_no_file(
    tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    """Node 0 waits for node 1, which has not started yet."""
    cluster = Cluster(tmp_path, start_job)
    (tmp_path / "node1.sh").write_text("exec sleep 300\n")
    before = files(tmp_path)
    job = cluster.start("--dry-run")
    job.wait_until(lambda: [*tmp_path.glob(".dry-run-*")], "node 0 has made its file")
    job.process.terminate()
    job.end(128 + signal.SIGUSR1)
    job.line("torchrun.py: SIGUSR1 before any rank was started")
    assert files(tmp_path) - before == {tmp_path / "run.out"}


def dry_run(config: Path, *launcher: object, settings: tuple[str, ...] = ()) -> tuple[int, str]:
    program = ("launch/pretrain_rl.py", "--dry-run", "--config", config, *settings)
    done = python("launch/torchrun.py", *launcher, *program)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_a_node_that_does_not_come_is_named_after_the_time_that_is_set(
    config: Path, tmp_path: Path
) -> None:
    """And a layout that two nodes cannot have."""
    meeting = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    settings = (f"run.dir={tmp_path}/run", "parallel.tensor=4")
    first = (*meeting, "--node-rank=0", "--rdzv-conf=timeout=1")
    code, said = dry_run(config, *first, settings=settings)
    assert code == 2
    assert re.search(r"\n {26}node 1: did not come in time\n", said), said
    assert "parallel.tensor=4 x parallel.pipeline=1 = 4 does not divide the 2 ranks" in said
    assert re.search(r"dry run: 2 of \d+ checks fail: nodes \(node 1\); layout \(node 0", said)
    code, said = dry_run(config, *meeting, "--node-rank=1", "--rdzv-conf=timeout=1")
    assert code == 2
    assert re.search(r"FAIL  ports +node 1 ", said), said
    assert list(tmp_path.iterdir()) == []


def test_tlt_train_checks_one_machine_and_plain_torchrun_refuses(config: Path) -> None:
    done = python("-m", "tlt_megatron.cli", "train", config, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 x 1 ranks" in done.stdout
    done = python("launch/pretrain_rl.py", "--config", config, "--dry-run")
    assert done.returncode == 2
    assert "--dry-run: must be started by tlt train or launch/torchrun.py" in done.stderr
